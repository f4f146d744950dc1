"""Short depthwise convolution."""
