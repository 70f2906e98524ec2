"""Known agent harnesses: a TOML file each, which says how it is installed, started, recognised and tidied up after."""
