//! Conversion of the API's convergence settings to the engine's, and of the engine's findings about
//! guests that write too fast to the API's.

use longhaul_api::{
    ApiError, Convergence, ErrorCode, Outpaced, StopChoice, StopReason, StopRule, TooFast,
};
use longhaul_engine::source::{Downtime, Source};
use longhaul_engine::stop::{self, Wish};
use longhaul_protocol::units::{show_bytes, show_duration};
use std::time::Duration;

/// Predictions of at least this duration count as unknown.
const KNOWN_MAX: Duration = Duration::from_secs(86_400);

/// Refuses invalid settings.
pub(crate) fn check(asked: &Convergence) -> Result<(), ApiError> {
    if (1..=99).contains(&asked.slow_at_most_percent) {
        return Ok(());
    }
    let text = format!(
        "`slow_at_most_percent` is {}: a guest can be slowed by 1 to 99 percent of its time",
        asked.slow_at_most_percent
    );
    Err(ApiError::new(ErrorCode::InvalidRequest, text))
}

/// Returns the limit to which QEMU may slow the guest, in percent of its time.
pub(crate) fn slow_at_most(asked: &Convergence) -> Option<u8> {
    (asked.too_fast == TooFast::Slow).then_some(asked.slow_at_most_percent)
}

/// Returns the settings for the engine.
pub(crate) fn wish(asked: &Convergence, downtime: Duration) -> Wish {
    let rule = match asked.stop_rule {
        StopRule::Predicted => stop::Rule::Predicted,
        StopRule::Cloudnet => stop::Rule::CloudNet,
        StopRule::Xen => stop::Rule::Xen,
        StopRule::Qemu => stop::Rule::Qemu,
    };
    let wait = match (asked.too_fast, rule) {
        // With QEMU's rule, a guest can only be waited for.
        (TooFast::Accept, stop::Rule::Predicted | stop::Rule::CloudNet | stop::Rule::Xen) => {
            Duration::ZERO
        }
        _ => Duration::from_millis(asked.wait_at_most_ms),
    };
    Wish {
        rule,
        downtime,
        wait,
    }
}

/// Returns a prediction in milliseconds; `None` if it is unknown.
pub(crate) fn known_ms(time: Duration) -> Option<u64> {
    (time < KNOWN_MAX).then_some(time.as_millis() as u64)
}

/// Returns how the time of the stop was chosen.
pub(crate) fn choice(
    asked: &Convergence,
    reason: stop::StopReason,
    predicted: Downtime,
    slowed_percent: Option<u8>,
) -> StopChoice {
    StopChoice {
        rule: asked.stop_rule,
        reason: match reason {
            stop::StopReason::WithinLimit => StopReason::WithinLimit,
            stop::StopReason::LocalMinimum => StopReason::LocalMinimum,
            stop::StopReason::RisingTrend => StopReason::RisingTrend,
            stop::StopReason::WaitedEnough => StopReason::WaitedEnough,
            stop::StopReason::Passes => StopReason::Passes,
            stop::StopReason::Bytes => StopReason::Bytes,
        },
        predicted_ms: known_ms(predicted.likely),
        predicted_at_most_ms: known_ms(predicted.at_most),
        slowed_percent,
    }
}

/// Returns what the API shows of a guest that writes faster than the link carries.
pub(crate) fn outpaced(
    guest: &str,
    asked: &Convergence,
    engine: &Source,
    now: Duration,
    slowed_percent: Option<u8>,
) -> Option<Outpaced> {
    let waited = engine.too_fast_for(now);
    let outpaced = engine.outpaced();
    if outpaced.is_none() && waited.is_none() {
        return None;
    }
    let rate = engine.written_bytes_per_s();
    let link = engine.link_now().map_or(0.0, |link| link.rate_bytes_per_s);
    let (written, link) = outpaced.map_or((rate, link), |o| {
        (o.written_bytes_per_s, o.link_bytes_per_s)
    });
    let left = Duration::from_millis(asked.wait_at_most_ms);
    let left = show_duration(left.saturating_sub(waited.unwrap_or_default()));
    let stopped = match known_ms(engine.predicted_downtime(now).likely) {
        Some(ms) => format!(
            "stopped for about {}",
            show_duration(Duration::from_millis(ms))
        ),
        None => "stopped".to_owned(),
    };
    Some(Outpaced {
        written_bytes_per_s: written as u64,
        link_bytes_per_s: link as u64,
        slowed_percent,
        then: match asked.too_fast {
            TooFast::Accept => format!("{guest} is {stopped}, when it does not get better"),
            TooFast::Slow => format!(
                "{guest} is slowed by up to {} %; {stopped} where that does not help within {left}",
                asked.slow_at_most_percent
            ),
            TooFast::Wait => {
                format!("a quieter moment is waited for; {stopped} where none comes within {left}")
            }
        },
        choices: choices(asked.too_fast),
    })
}

/// Returns the other choices for a guest that writes too fast.
pub(crate) fn choices(but: TooFast) -> String {
    let all = [
        (TooFast::Slow, "slow it (--too-fast slow)"),
        (TooFast::Wait, "wait for a quieter moment (--too-fast wait)"),
        (
            TooFast::Accept,
            "accept a longer downtime (--too-fast accept)",
        ),
    ];
    let others = all.into_iter().filter(|(what, _)| *what != but);
    let others: Vec<&str> = others.map(|(_, how)| how).collect();
    format!("{}, or ask for less (--downtime)", others.join(", "))
}

/// Returns a plan's note about a guest that would write too fast.
pub(crate) fn note(
    guest: &str,
    asked: &Convergence,
    limit: Duration,
    found: Duration,
    written_bytes_per_s: f64,
    link_bytes_per_s: f64,
) -> String {
    let rate = |rate: f64| format!("{}/s", show_bytes(rate as u64));
    let wait = show_duration(Duration::from_millis(asked.wait_at_most_ms));
    let then = match asked.too_fast {
        TooFast::Accept => String::new(),
        TooFast::Slow => format!(
            " It is slowed by up to {} % for at most {wait} first.",
            asked.slow_at_most_percent
        ),
        TooFast::Wait => format!(" A quieter moment is waited for, for at most {wait}."),
    };
    format!(
        "{guest} writes too fast: {} as sent, and the link carries {}. It would stand still for \
         about {}, not {}.{then} Choices: {}.",
        rate(written_bytes_per_s),
        rate(link_bytes_per_s),
        show_duration(found),
        show_duration(limit),
        choices(asked.too_fast),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_ends() {
        let mut asked = Convergence::default();
        let limit = Duration::from_millis(300);
        assert_eq!(wish(&asked, limit).wait, Duration::ZERO);
        assert_eq!(slow_at_most(&asked), None);
        asked.stop_rule = StopRule::Qemu;
        assert_eq!(wish(&asked, limit).wait, Duration::from_secs(300));
        asked.too_fast = TooFast::Slow;
        assert_eq!(slow_at_most(&asked), Some(60));
        for percent in [0, 100] {
            asked.slow_at_most_percent = percent;
            assert!(check(&asked).is_err());
        }
    }

    #[test]
    fn a_plan_names_the_other_choices() {
        let asked = Convergence {
            too_fast: TooFast::Wait,
            ..Convergence::default()
        };
        let (limit, found) = (Duration::from_millis(300), Duration::from_millis(2100));
        let note = note("web-7", &asked, limit, found, 2e7, 1e7);
        for part in [
            "19 MiB/s as sent",
            "9.5 MiB/s",
            "2.1 s, not 300 ms",
            "5 min",
            "slow",
            "accept",
        ] {
            assert!(note.contains(part), "{part}: {note}");
        }
        assert!(!note.contains("--too-fast wait"), "{note}");
    }
}
