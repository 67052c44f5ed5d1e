"""Parts of a step that only a GPU uses; on a CPU nothing here is called."""
