//! Defines the five properties of a live migration (paper 003, section 3.1) as figures: those of a
//! move that ended, and those that are known of one before it begins.

use crate::disks::DiskChoice;
use crate::migration::{Phase, Side, Strategy};
use crate::plan::{Judgement, Plan, PredictedRange, Prediction};
use crate::report::{Cost, DiskReport, Report};
use crate::risk::{Follows, PhaseRisks, Stakes};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The waits that are counted are longer than these, in milliseconds.
const STALLS_MS: [f64; 3] = [10.0, 100.0, 1000.0];

/// The five properties of a live migration, in figures. What a plan does not know yet is null.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Properties {
    /// How much of the guest's service was interrupted.
    pub continuity: Continuity,
    /// What the move took from both hosts and the link.
    pub resources: Resources,
    /// What was survived, and what failures would have meant.
    pub robustness: Robustness,
    /// The figures against their predictions.
    pub predictability: Predictability,
    /// How much of its processors the guest used before, during and after the move.
    pub transparency: Transparency,
}

/// How much of the guest's service was interrupted.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Continuity {
    /// Downtime, in milliseconds.
    pub downtime_ms: Option<f64>,
    /// The times for which the guest, or a part of it, stood still. Null if they are not known.
    pub stalls: Option<Stalls>,
    /// Estimate of the work that the guest did not do because of the move. Null if its rate before
    /// the move is not known.
    pub lost_work: Option<LostWork>,
}

/// The times for which a guest, or a part of it, stood still: the downtime, and each wait for a
/// page of memory that followed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Stalls {
    /// Number of stalls that were longer than 10 ms.
    pub above_10_ms: u64,
    /// Number of stalls that were longer than 100 ms.
    pub above_100_ms: u64,
    /// Number of stalls that were longer than 1000 ms.
    pub above_1000_ms: u64,
    /// The longest stall, in milliseconds.
    pub longest_ms: f64,
}

/// An estimate of a guest's lost work, in seconds of one vCPU. It assumes that the guest would have
/// gone on at its rate from before the move. A guest that became busier is not counted as a gain.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LostWork {
    /// Sum of the parts that are known.
    pub total_s: f64,
    /// Part while it ran at the source during the move; null if its rate then is not known.
    pub copying_s: Option<f64>,
    /// Part while it was stopped; null if it was not stopped.
    pub stopped_s: Option<f64>,
    /// Part after the switchover, while its rate was measured there; null if it was not.
    pub after_s: Option<f64>,
}

/// What a move took.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Resources {
    /// Number of bytes sent over the link to the destination.
    pub link_bytes: Option<u64>,
    /// Number of bytes sent over the link back to the source.
    pub link_bytes_back: Option<u64>,
    /// Processor time and memory on both hosts.
    pub cost: Cost,
}

/// What was survived, and what failures would have meant.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Robustness {
    /// Number of interruptions of the link that the move survived, each by connecting again.
    pub interruptions: Option<u32>,
    /// What failures mean in each phase: in a plan those to come, in a report those that the move
    /// was in. Empty at the destination.
    pub phases: Vec<PhaseRisks>,
}

/// The figures against their predictions.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Predictability {
    /// How likely each figure lies in its range, in percent; null without a prediction.
    pub likelihood_percent: Option<u8>,
    /// Number of earlier moves by whose outcomes the ranges are corrected; null without a
    /// prediction.
    pub learned_from: Option<u32>,
    /// Number of bytes over the link to the destination.
    pub link_bytes: Option<Compared>,
    /// Time from the start to the end, in milliseconds.
    pub total_ms: Option<Compared>,
    /// Downtime, in milliseconds.
    pub downtime_ms: Option<Compared>,
}

/// A predicted figure, and what it was.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Compared {
    /// Predicted range.
    pub predicted: PredictedRange,
    /// Figure; null before it is known.
    pub was: Option<f64>,
    /// Figure divided by the middle of the range; null before it is known, or if the middle is 0.
    pub was_to_likely: Option<f64>,
    /// How the figure compares with the range; null before the move has completed.
    pub judged: Option<Judgement>,
}

/// How much of its processors the guest used. This is demand, not work: an idle guest uses little,
/// and one that waits for pages or is throttled uses less than before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Transparency {
    /// Rate before the move: while it was prepared. In a plan: while the plan was made.
    pub before: Option<GuestRate>,
    /// Rate at the source while the guest was copied, until it was stopped.
    pub during: Option<GuestRate>,
    /// Rate at the destination from the switchover to the end of the move: for 2 to 10 seconds. It
    /// may be known up to 2 seconds after the end.
    pub after: Option<GuestRate>,
    /// How much QEMU slowed the guest when it was stopped, in percent of its time; null if it did
    /// not.
    pub slowed_percent: Option<u8>,
}

/// The rate of a guest: the processor time of its vCPUs per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct GuestRate {
    /// Processor time of its vCPUs in one second, in seconds: 2.0 if two vCPUs are busy.
    pub vcpu_s_per_s: f64,
    /// Time for which it was measured, in milliseconds.
    pub measured_ms: f64,
    /// Whether all of QEMU's threads are counted, because its vCPUs cannot be told apart from the
    /// others.
    pub whole_process: bool,
}

/// The rates of a guest that moves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct GuestRates {
    /// Rate before the move.
    pub before: Option<GuestRate>,
    /// Rate while the guest was copied.
    pub during: Option<GuestRate>,
    /// Rate after the switchover.
    pub after: Option<GuestRate>,
}

impl Properties {
    /// Returns the properties of a move, by the figures of its report.
    pub fn of(report: &Report) -> Self {
        let rates = report.guest_rates;
        Self {
            continuity: Continuity {
                downtime_ms: report.downtime_ms,
                stalls: stalls(report),
                lost_work: lost_work(&rates, report.downtime_ms),
            },
            resources: Resources {
                link_bytes: report.link_bytes,
                link_bytes_back: report.link_bytes_back,
                cost: report.cost.clone(),
            },
            robustness: Robustness {
                interruptions: report.interruptions,
                phases: risks(report),
            },
            predictability: predictability(report),
            transparency: Transparency {
                before: rates.before,
                during: rates.during,
                after: rates.after,
                slowed_percent: report.stop.and_then(|stop| stop.slowed_percent),
            },
        }
    }

    /// Returns what is known of a planned move. `follows` says whether its memory or disks would
    /// follow it.
    pub fn planned(
        plan: &Plan,
        rate: Option<GuestRate>,
        follows: Follows,
        arbitrated: bool,
    ) -> Self {
        let stakes = Stakes {
            guest: &plan.guest,
            source: &plan.source,
            destination: &plan.destination,
            follows,
            early_release: plan.asked.early_release,
            arbitrated,
            patience_ms: None,
        };
        let phases = Phase::ALL.into_iter();
        // A plan does not know whether both copies will be compared.
        let phases = phases.filter(|phase| *phase != Phase::Verifying);
        Self {
            robustness: Robustness {
                interruptions: None,
                phases: phases.map(|phase| stakes.risks(phase)).collect(),
            },
            predictability: plan.predictions.first().map(predicted).unwrap_or_default(),
            transparency: Transparency {
                before: rate,
                ..Transparency::default()
            },
            ..Self::default()
        }
    }
}

/// Returns the downtime and the waits for pages, by their lengths. `None` if the guest was not
/// stopped, or waited for pages that were not counted.
fn stalls(report: &Report) -> Option<Stalls> {
    let downtime_ms = report.downtime_ms?;
    let counted = |above_ms: f64| u64::from(downtime_ms > above_ms);
    let [above_10_ms, above_100_ms, above_1000_ms] = STALLS_MS.map(counted);
    let mut stalls = Stalls {
        above_10_ms,
        above_100_ms,
        above_1000_ms,
        longest_ms: downtime_ms,
    };
    if let Some(faults) = &report.faults {
        stalls.above_10_ms += faults.above_10_ms?;
        stalls.above_100_ms += faults.above_100_ms?;
        stalls.above_1000_ms += faults.above_1000_ms?;
        stalls.longest_ms = stalls.longest_ms.max(faults.longest_ms);
        return Some(stalls);
    }
    let followed = matches!(report.strategy, Strategy::Hybrid | Strategy::Postcopy);
    (!followed).then_some(stalls)
}

/// Estimates what a guest did not do: the difference to its rate before, times the duration.
fn lost_work(rates: &GuestRates, downtime_ms: Option<f64>) -> Option<LostWork> {
    let before = rates.before?.vcpu_s_per_s;
    let less = |rate: GuestRate| {
        let missing = (before - rate.vcpu_s_per_s).max(0.0);
        missing * rate.measured_ms / 1e3
    };
    let parts = [
        rates.during.map(less),
        downtime_ms.map(|downtime_ms| before * downtime_ms / 1e3),
        rates.after.map(less),
    ];
    let [copying_s, stopped_s, after_s] = parts;
    parts.iter().any(Option::is_some).then(|| LostWork {
        total_s: parts.into_iter().flatten().sum(),
        copying_s,
        stopped_s,
        after_s,
    })
}

fn risks(report: &Report) -> Vec<PhaseRisks> {
    // The destination does not know what was asked for.
    if report.side == Side::Destination {
        return Vec::new();
    }
    let stakes = Stakes {
        guest: &report.guest,
        source: &report.source,
        destination: &report.destination,
        follows: follows(report),
        early_release: report.asked.early_release,
        arbitrated: report.arbitrated,
        patience_ms: Some(report.asked.patience_ms),
    };
    let was_in = |phase: &Phase| {
        let mut phases = report.phases.iter();
        *phase == report.phase || phases.any(|time| time.phase == *phase)
    };
    let phases = Phase::ALL.into_iter().filter(was_in);
    phases.map(|phase| stakes.risks(phase)).collect()
}

fn follows(report: &Report) -> Follows {
    // A base image comes from the destination's repository, not from the source.
    let disk =
        |disk: &DiskReport| matches!(disk.strategy, DiskChoice::Hybrid | DiskChoice::Postcopy);
    match report.strategy {
        Strategy::Hybrid | Strategy::Postcopy => Follows::Something,
        _ if report.disks.iter().any(disk) => Follows::Something,
        Strategy::Auto => Follows::Perhaps,
        Strategy::Precopy => Follows::Nothing,
    }
}

fn predicted(prediction: &Prediction) -> Predictability {
    let compared = |range: Option<PredictedRange>| {
        range.map(|predicted| Compared {
            predicted,
            was: None,
            was_to_likely: None,
            judged: None,
        })
    };
    Predictability {
        likelihood_percent: Some(prediction.likelihood_percent),
        learned_from: Some(prediction.learned_from),
        link_bytes: compared(prediction.link_bytes),
        total_ms: compared(prediction.total_ms),
        downtime_ms: compared(prediction.downtime_ms),
    }
}

fn predictability(report: &Report) -> Predictability {
    let Some(prediction) = &report.predicted else {
        return Predictability::default();
    };
    let judged = report.judged;
    let with = |compared: Option<Compared>, was: Option<f64>, judged: Option<Judgement>| {
        compared.map(|compared| Compared {
            was,
            was_to_likely: was
                .filter(|_| compared.predicted.likely > 0)
                .map(|was| was / compared.predicted.likely as f64),
            judged,
            ..compared
        })
    };
    let figure = |figure: Option<u64>| figure.map(|figure| figure as f64);
    let predicted = predicted(prediction);
    Predictability {
        link_bytes: with(
            predicted.link_bytes,
            figure(report.link_bytes),
            judged.and_then(|judged| judged.link_bytes),
        ),
        total_ms: with(
            predicted.total_ms,
            figure(report.total_ms),
            judged.and_then(|judged| judged.total_ms),
        ),
        downtime_ms: with(
            predicted.downtime_ms,
            report.downtime_ms,
            judged.and_then(|judged| judged.downtime_ms),
        ),
        ..predicted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(vcpu_s_per_s: f64, measured_ms: f64) -> Option<GuestRate> {
        Some(GuestRate {
            vcpu_s_per_s,
            measured_ms,
            whole_process: false,
        })
    }

    #[test]
    fn lost_work_is_the_missing_rate_times_its_duration() {
        let rates = GuestRates {
            before: rate(1.5, 800.0),
            during: rate(1.0, 10_000.0),
            after: rate(1.75, 2000.0),
        };
        let lost = lost_work(&rates, Some(200.0)).unwrap();
        assert_eq!(lost.copying_s, Some(5.0));
        assert!((lost.stopped_s.unwrap() - 0.3).abs() < 1e-9);
        assert_eq!(lost.after_s, Some(0.0), "no gain");
        assert!((lost.total_s - 5.3).abs() < 1e-9);
    }

    #[test]
    fn lost_work_has_the_parts_that_are_known() {
        let rates = GuestRates {
            before: rate(1.0, 800.0),
            ..GuestRates::default()
        };
        assert_eq!(lost_work(&rates, None), None);
        let lost = lost_work(&rates, Some(500.0)).unwrap();
        assert_eq!((lost.total_s, lost.stopped_s), (0.5, Some(0.5)));
        assert_eq!((lost.copying_s, lost.after_s), (None, None));
        let unknown = GuestRates {
            during: rate(1.0, 10_000.0),
            ..GuestRates::default()
        };
        assert_eq!(lost_work(&unknown, Some(200.0)), None);
    }
}
