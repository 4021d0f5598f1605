"""Doctor: checks of an artifact, its data and its target that say why little is accepted. Import from its modules."""
