//! Runs the hooks of a migration's steps, and reports their cost.

use crate::context::Context;
use crate::host::hooks::{About, Step};
use crate::status::migration::Entry;
use longhaul_api::{ApiError, Check, ErrorCode, HookRun, Side, Verdict};
use longhaul_protocol::Generation;
use longhaul_protocol::message;

impl Context {
    /// Runs a step's hook, if there is one. Returns an error if the hook failed and stops the
    /// migration. A failure that is too late for that is only logged and reported.
    pub(crate) async fn hook(
        &self,
        entry: &Entry,
        step: Step,
        next: Generation,
    ) -> Result<(), ApiError> {
        let migration = entry.migration();
        let about = About {
            migration: entry.id(),
            guest: migration.guest,
            source: migration.source,
            destination: migration.destination,
            generation: next.0,
        };
        let Some(ran) = self.parts.config.hooks.run(step, &about).await else {
            return Ok(());
        };
        let (guest, hook) = (&about.guest, step.name());
        let time_ms = ran.time.as_secs_f64() * 1e3;
        let error = ran.result.as_ref().err().map(ToString::to_string);
        entry.report_with(|report| {
            report.hooks.push(HookRun {
                step: hook.to_owned(),
                time_ms,
                guest_stood_still: step.holds_guest(),
                error,
            });
        });
        let why = match ran.result {
            Ok(said) => {
                let said = said.text();
                tracing::info!(migration = %entry.id(), guest, hook, time_ms, said, "hook");
                return Ok(());
            }
            Err(why) => why,
        };
        let said = why.said();
        tracing::error!(migration = %entry.id(), guest, hook, time_ms, %why, said, "hook failed");
        if !step.can_veto() {
            return Ok(());
        }
        let host = &self.parts.config.name;
        let text = format!("the hook `{hook}` on {host} stopped the move: {why}");
        let hint = format!("the log of the agent on {host} has more of what it wrote");
        Err(ApiError::new(ErrorCode::HookFailed, text).hint(hint))
    }

    /// Runs the hook of a step at which the migration can no longer be stopped.
    pub(crate) async fn last_hook(&self, entry: &Entry, step: Step, next: Generation) {
        // Only hooks before the release return errors.
        if let Err(error) = self.hook(entry, step, next).await {
            tracing::error!(migration = %entry.id(), %error, "too late to matter");
        }
    }

    /// Returns the hook checks of this host as the destination, for another host.
    pub(crate) fn hook_answers(&self) -> Vec<message::Check> {
        let checks = self.hook_checks(Side::Destination).into_iter();
        let told = checks.map(|check| message::Check {
            verdict: match check.verdict {
                Verdict::Ok => message::Verdict::Fine,
                Verdict::Warn => message::Verdict::Warning,
                Verdict::Refuse => message::Verdict::Refused,
            },
            text: check.message,
            hint: check.hint,
        });
        told.collect()
    }

    /// Checks whether the hooks of a side can be run.
    pub(crate) fn hook_checks(&self, side: Side) -> Vec<Check> {
        let host = &self.parts.config.name;
        let unfit = self.parts.config.hooks.unfit(side);
        let unfit = unfit.into_iter().map(|(step, error)| {
            let text = format!("the hook `{}` on {host}: {error}", step.name());
            let hint = "correct it, or take it out of the agent's configuration";
            match step.can_veto() {
                true => Check::refuse("hooks", text, hint),
                false => Check::warn("hooks", text, hint),
            }
        });
        unfit.collect()
    }
}
