"""The maker of the embedded model's weights; not installed."""
