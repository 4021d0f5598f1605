"""The devices and processes that hold a target, and its layers compiled for them."""
