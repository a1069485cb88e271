//! Attention variants.
