"""A domain's data: read from where it lies, checked, labelled by a teacher where it has no labels, cut into parts."""
