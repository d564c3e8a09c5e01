"""Pictures and their captions, in an order that depends on seed, epoch and index alone."""
