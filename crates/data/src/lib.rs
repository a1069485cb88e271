//! Longwall.
