"""A domain's data: reading, checking, labelling of unlabelled data by a teacher, and splitting into parts."""
