"""Applications over the public client: video analytics, and the demonstration of the whole job."""
