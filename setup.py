"""Finds the packages; everything else is in setup.cfg, which cannot say that two of them install inside the third."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

config = ConfigParser()
config.read(Path(__file__).with_name("setup.cfg"))
url = config["tool:hf_memopt"]["repository_url"]

setup(
    packages=[
        *find_packages(include=["hf_memopt", "hf_memopt.*"]),
        *(f"hf_memopt.{name}" for name in find_packages(include=["callbacks", "callbacks.*", "recipes", "recipes.*"])),
    ],
    project_urls={"Repository": url} if url else {},
)
