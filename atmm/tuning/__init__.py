"""Measurement of strategies and tilings, and tables of the fastest ones."""
