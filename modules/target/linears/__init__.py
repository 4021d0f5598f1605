"""Linear layers in the form that is fastest on this machine."""
