"""Statistics of the data of a fleet, as pure code: what devices are asked for, and what may be shown of their answers."""
