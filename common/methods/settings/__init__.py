"""The settings of every component that a method is made of: importable without torch."""
