"""Where counters come from and samples go."""
