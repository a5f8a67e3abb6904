"""From a TOML file to frozen cases."""
