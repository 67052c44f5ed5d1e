"""Admission: from the arrival of a request to its entry into the KV room, after which policies may select it."""
