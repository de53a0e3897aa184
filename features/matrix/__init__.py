"""Networks of sites, scored at each other site: who helps whom."""
