//! What holds for the workspace as a whole, as functions from texts to findings.
//!
//! [`purity`]: the cores have no sockets, files, clocks, threads or async. [`dependencies`]: who
//! may depend on whom, licences, sources, versions. [`documents`]: links, paths, lengths of files.
//! [`policy`] holds every list, each exception with its reason. Tests of this package apply them
//! to the workspace; unit tests show for each rule something that breaks it.

pub mod dependencies;
pub mod documents;
pub mod modules;
pub mod policy;
pub mod purity;
