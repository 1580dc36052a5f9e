//! The mark that keeps a guest that left from being started here, as a companion.

use crate::context::Context;
use crate::residue::{Again, Residue};
use crate::source::companion::{About, Companion, Step};
use longhaul_api::{ApiError, Check};
use longhaul_hypervisor::Guest;
use std::sync::Arc;
use tokio::task::block_in_place;

pub(super) struct Departure(About);

impl Departure {
    pub(super) fn new(about: About) -> Self {
        Self(about)
    }
}

impl Companion for Departure {
    fn look(&self, guest: &Guest) -> Vec<Check> {
        vec![self.0.context.starter_check(guest)]
    }

    /// Before anything else is prepared, so that no mark is ever missing.
    fn prepare<'a>(&'a mut self, guest: &'a Guest) -> Step<'a, Result<(), ApiError>> {
        Box::pin(async move {
            let About {
                context,
                host,
                shown,
                ..
            } = &self.0;
            let Some((_, next)) = shown else {
                return Ok(());
            };
            block_in_place(|| context.mark(guest.description(), host, next.0))
        })
    }
}

/// Marks of guests that belong to this host again.
pub(super) struct Marks;

impl Residue for Marks {
    fn sweep<'a>(&'a self, context: &'a Arc<Context>) -> Step<'a, Again> {
        block_in_place(|| context.sweep_marks());
        Box::pin(async { None })
    }
}
