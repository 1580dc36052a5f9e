//! The operator's hooks as companions of a guest.

use crate::destination::companion::{About, Companion, Offered, Step};
use crate::host::hooks;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::message::{Check, Refusal, RefusalCode};

/// The hooks at the destination.
pub(super) struct Arrival(About);

impl Arrival {
    pub(super) fn new(about: About) -> Self {
        Self(about)
    }

    /// Runs the hook of a step at which the migration can no longer be stopped.
    fn last(&self, step: hooks::Step) -> Step<'static, ()> {
        let About { context, shown, .. } = self.0.clone();
        Box::pin(async move {
            if let Some((entry, next)) = shown {
                context.last_hook(&entry, step, next).await;
            }
        })
    }
}

impl Companion for Arrival {
    fn look(&self, _guest: &GuestDescription) -> Vec<Check> {
        self.0.context.hook_answers()
    }

    fn prepare<'a>(&'a mut self, _arriving: &'a mut Offered<'_>) -> Step<'a, Result<(), Refusal>> {
        let About { context, shown, .. } = &self.0;
        Box::pin(async move {
            let Some((entry, next)) = shown else {
                return Ok(());
            };
            let ran = context.hook(entry, hooks::Step::Arriving, *next).await;
            ran.map_err(|error| Refusal {
                code: RefusalCode::Unsuitable,
                text: error.message,
                hint: error.hint,
            })
        })
    }

    fn released(&mut self) -> Step<'_, Result<(), String>> {
        let About { context, shown, .. } = &self.0;
        Box::pin(async move {
            let Some((entry, next)) = shown else {
                return Ok(());
            };
            let ran = context.hook(entry, hooks::Step::Ready, *next).await;
            ran.map_err(|error| error.message)
        })
    }

    fn committed(&mut self) -> Step<'_, ()> {
        self.last(hooks::Step::Taken)
    }

    fn running(&mut self) -> Option<Step<'static, ()>> {
        Some(self.last(hooks::Step::Running))
    }

    fn aborted(&mut self) -> Step<'_, ()> {
        self.last(hooks::Step::NotComing)
    }
}
