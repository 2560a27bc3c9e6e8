"""What pyproject.toml and saved speculators call this version, installed or not."""

VERSION = "0.1.0"
