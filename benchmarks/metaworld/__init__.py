"""Reflow proven in Meta-World: recorded experts, a teacher, one-step students, and their success rates."""

REPO_ID = "local/metaworld_experts"
