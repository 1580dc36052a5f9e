//! The operator's hooks as companions of a guest.

use crate::context::Context;
use crate::destination::companion::{About, Companion, Offered, Step};
use crate::host::hooks;
use crate::source::companion as source;
use crate::status::migration::Entry;
use longhaul_api::{ApiError, ErrorCode, Side, Verdict};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::qmp::Qmp;
use longhaul_protocol::Generation;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::message::{Check, Refusal, RefusalCode};
use std::sync::Arc;

/// The hooks at the destination.
pub(super) struct Arrival(About);

impl Arrival {
    pub(super) fn new(about: About) -> Self {
        Self(about)
    }
}

/// The entry of an attempt, and the generation of the right after it.
type Shown = Option<(Arc<Entry>, Generation)>;

/// Runs a hook that may stop the migration.
async fn run(context: &Context, shown: &Shown, step: hooks::Step) -> Result<(), ApiError> {
    match shown {
        Some((entry, next)) => context.hook(entry, step, *next).await,
        None => Ok(()),
    }
}

/// Runs the hook of a step at which the migration can no longer be stopped.
fn last(context: &Arc<Context>, shown: &Shown, step: hooks::Step) -> Step<'static, ()> {
    let (context, shown) = (context.clone(), shown.clone());
    Box::pin(async move {
        if let Some((entry, next)) = shown {
            context.last_hook(&entry, step, next).await;
        }
    })
}

impl Companion for Arrival {
    fn look(&self, _guest: &GuestDescription) -> Vec<Check> {
        self.0.context.hook_answers()
    }

    fn prepare<'a>(&'a mut self, _offered: &'a mut Offered<'_>) -> Step<'a, Result<(), Refusal>> {
        let About { context, shown, .. } = &self.0;
        Box::pin(async move {
            let ran = run(context, shown, hooks::Step::Arriving).await;
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
            let ran = run(context, shown, hooks::Step::Ready).await;
            ran.map_err(|error| error.message)
        })
    }

    fn committed(&mut self) -> Step<'_, ()> {
        last(&self.0.context, &self.0.shown, hooks::Step::Taken)
    }

    fn running(&mut self) -> Option<Step<'static, ()>> {
        let About { context, shown, .. } = &self.0;
        Some(last(context, shown, hooks::Step::Running))
    }

    fn aborted(&mut self) -> Step<'_, ()> {
        last(&self.0.context, &self.0.shown, hooks::Step::NotComing)
    }
}

/// The hooks at the source.
pub(super) struct Departure(source::About);

impl Departure {
    pub(super) fn new(about: source::About) -> Self {
        Self(about)
    }

    fn run(&self, step: hooks::Step) -> Step<'_, Result<(), ApiError>> {
        Box::pin(run(&self.0.context, &self.0.shown, step))
    }
}

impl source::Companion for Departure {
    fn look(&self, _guest: &Guest) -> Vec<longhaul_api::Check> {
        self.0.context.hook_checks(Side::Source)
    }

    /// Refuses hooks that could not be run later.
    fn check<'a>(&'a mut self, _guest: &'a Guest, _qmp: &'a Qmp) -> Step<'a, Result<(), ApiError>> {
        let mut checks = self.0.context.hook_checks(Side::Source).into_iter();
        let refused = checks.find(|check| check.verdict == Verdict::Refuse);
        Box::pin(async move {
            match refused {
                None => Ok(()),
                Some(check) => Err(ApiError::new(ErrorCode::Refused, check.message)
                    .hint(check.hint.unwrap_or_default())),
            }
        })
    }

    fn prepare<'a>(&'a mut self, _guest: &'a Guest) -> Step<'a, Result<(), ApiError>> {
        self.run(hooks::Step::Prepare)
    }

    fn stopping(&mut self) -> Step<'_, Result<(), ApiError>> {
        self.run(hooks::Step::Stopping)
    }

    fn stopped(&mut self) -> Step<'_, Result<(), ApiError>> {
        self.run(hooks::Step::Stopped)
    }

    fn released(&mut self) -> Step<'_, Result<(), ApiError>> {
        self.run(hooks::Step::Released)
    }

    fn finished(&mut self, here: bool) -> Step<'_, ()> {
        let step = match here {
            true => hooks::Step::Stays,
            false => hooks::Step::Gone,
        };
        last(&self.0.context, &self.0.shown, step)
    }
}
