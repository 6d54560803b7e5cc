"""Finds the packages; everything else is in setup.cfg, which cannot say that two of them install inside the third."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["hf_memopt", "hf_memopt.*"]),
        *(f"hf_memopt.{name}" for name in find_packages(include=["callbacks", "callbacks.*", "recipes", "recipes.*"])),
    ]
)
