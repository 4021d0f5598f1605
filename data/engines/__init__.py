"""States of the target that another engine gives."""
