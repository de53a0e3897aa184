"""Optional parts of Attune, which the rest never imports: bridges to other libraries, pFedGP, and curves for other programs."""
