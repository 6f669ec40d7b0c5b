"""springtide gateway: the HTTP face of springtide."""
