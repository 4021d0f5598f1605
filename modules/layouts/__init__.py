"""Names of tensors and fixed settings of each family in the layouts of other projects."""
