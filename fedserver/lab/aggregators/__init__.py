"""How the server makes the next value of a part out of a cohort's updates."""
