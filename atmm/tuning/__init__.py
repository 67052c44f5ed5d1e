"""Measuring strategies and tilings, and the tables of what was fastest."""
