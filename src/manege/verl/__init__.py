"""manege inside verl: its trainer rolls out in our harnesses, gateway and controller (docs/guides/verl.md)."""
