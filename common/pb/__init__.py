"""Generated from proto/attune/v1 by `make proto`; a test proves it current."""
