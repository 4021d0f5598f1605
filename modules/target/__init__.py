"""The frozen target model: loading, KV cache, tree attention, packed linear layers, hidden-state taps."""
