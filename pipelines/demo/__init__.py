"""The synthetic cohort that `make demo` runs on."""
