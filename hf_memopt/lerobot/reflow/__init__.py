"""Training a student on a teacher's couplings."""
