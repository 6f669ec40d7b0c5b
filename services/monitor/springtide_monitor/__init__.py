"""The monitor: what pods really use, told to whoever packs, pays or compares."""
