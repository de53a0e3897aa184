"""Choice of a method among candidates, as pure code: what is tried, who goes on in a race (`--method auto`), and who wins."""
