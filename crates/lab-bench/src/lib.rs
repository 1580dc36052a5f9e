//! Implements the laboratory's benches: Longhaul beside its baselines, measured, and the pages of
//! results with plots.
//!
//! [`bench`] has the benches and their documents, [`moves`] measures one move by any system,
//! [`peer`] moves guests by QEMU's own migration, and [`results`] makes the pages.

pub mod bench;
pub mod clients;
mod image;
pub mod measure;
pub mod moves;
pub mod peer;
pub mod results;
pub mod warm;
