"""Where federation pays, and where it does not: recipes over natural and drawn splits (`fedserver simulate --benchmark`)."""
