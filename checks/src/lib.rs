//! Implements the rules for the workspace as a whole, as functions from texts to findings.
//!
//! [`purity`]: the cores have no sockets, files, clocks, threads or async. [`dependencies`]: who
//! may depend on which others, licences, sources, versions. [`documents`]: links, paths, lengths of
//! files. [`refusals`]: a plan shows what a move would meet. [`policy`] holds the other lists, each
//! exception with its reason. Tests of this package apply the rules to the workspace; unit tests
//! show a violation of each rule.

pub mod dependencies;
pub mod documents;
pub mod modules;
pub mod policy;
pub mod purity;
pub mod refusals;
