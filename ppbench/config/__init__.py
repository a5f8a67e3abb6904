"""From a TOML file to frozen cases: parsed, checked, located when wrong, expanded."""
