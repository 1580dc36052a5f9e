//! Defines what a failure means for a guest in each phase of its move.

use crate::migration::Phase;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a failure means for the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Consequence {
    /// It runs on where it is, and needs no other host.
    RunsOn,
    /// The move fails. It runs on at the source.
    Stays,
    /// It runs on at the source while the hosts connect again. If that takes longer than
    /// `patience_ms`, the move fails.
    Retry,
    /// It is stopped already, and continues at the source by itself. The move fails.
    Returns,
    /// It is stopped, or waits for missing blocks, until the hosts are connected again. Then it
    /// continues by itself.
    Pause,
    /// It is stopped until an operator decides where it runs. Nothing is lost.
    Decision,
    /// It ends with the host that runs it, as without a move, and can be started again.
    AsWithoutMove,
    /// It ends with the destination. An operator can take it back at the source, as it was when it
    /// was stopped there.
    TakenBack,
    /// It is lost, because a part of its memory or disks is only on the failed host.
    Lost,
}

/// A consequence, and the same as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Risk {
    /// Consequence.
    pub consequence: Consequence,
    /// Consequence, as text.
    pub text: String,
}

/// What failures in a phase mean for the guest. Where a phase has several steps, it is the worst of
/// them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PhaseRisks {
    /// Phase.
    pub phase: Phase,
    /// The link between the hosts is cut.
    pub if_link_is_cut: Risk,
    /// The source is lost, with the memory and the disks in it.
    pub if_source_dies: Risk,
    /// The destination is lost, with the memory and the disks in it.
    pub if_destination_dies: Risk,
}

/// Whether something follows the guest when it runs at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follows {
    /// Nothing does.
    Nothing,
    /// Something does if the guest writes too fast.
    Perhaps,
    /// Something does.
    Something,
}

/// The properties of a move by which a failure has its consequences.
#[derive(Debug, Clone, Copy)]
pub struct Stakes<'a> {
    /// Name of the guest.
    pub guest: &'a str,
    /// Host that the guest leaves.
    pub source: &'a str,
    /// Host that the guest moves to.
    pub destination: &'a str,
    /// Whether memory or disks follow.
    pub follows: Follows,
    /// Whether the source releases the guest when it stops it.
    pub early_release: bool,
    /// Whether the realm's arbiter ends a doubt.
    pub arbitrated: bool,
    /// Time limit for an interruption, in milliseconds; `None` if it is not known yet.
    pub patience_ms: Option<u64>,
}

impl Stakes<'_> {
    /// Returns what failures mean in a phase.
    pub fn risks(&self, phase: Phase) -> PhaseRisks {
        let [if_link_is_cut, if_source_dies, if_destination_dies] = match phase {
            Phase::Preparing => [self.cut_early(), self.ends_at_source(), self.stays()],
            Phase::Precopy => [self.retry(), self.ends_at_source(), self.stays()],
            Phase::Stopping | Phase::Loading | Phase::Verifying => match self.early_release {
                false => [self.returns(), self.ends_at_source(), self.returns()],
                true => [
                    self.doubt(),
                    self.ends_unless_complete(),
                    self.destination_in_doubt(),
                ],
            },
            Phase::HandingOver => [
                self.doubt(),
                self.source_in_doubt(),
                self.destination_in_doubt(),
            ],
            Phase::Finishing => self.finishing(),
        };
        PhaseRisks {
            phase,
            if_link_is_cut,
            if_source_dies,
            if_destination_dies,
        }
    }

    fn cut_early(&self) -> Risk {
        let Self { guest, source, .. } = self;
        risk(
            Consequence::Stays,
            format!(
                "a lost connection ends the move before it begins: {guest} runs on at {source}"
            ),
        )
    }

    fn stays(&self) -> Risk {
        let Self { guest, source, .. } = self;
        risk(
            Consequence::Stays,
            format!("the move fails: {guest} runs on at {source}"),
        )
    }

    fn retry(&self) -> Risk {
        let Self { guest, source, .. } = self;
        let within = match self.patience_ms {
            Some(ms) => format!("for up to {} s", ms as f64 / 1e3),
            None => "as long as `--patience` says".to_owned(),
        };
        risk(
            Consequence::Retry,
            format!(
                "{guest} runs on at {source} while the hosts connect again, {within}; then the \
                 move fails"
            ),
        )
    }

    fn returns(&self) -> Risk {
        let Self { guest, source, .. } = self;
        risk(
            Consequence::Returns,
            format!(
                "{guest} is stopped for as long as the requested downtime, and then continues at \
                 {source}; the move fails"
            ),
        )
    }

    fn ends_at_source(&self) -> Risk {
        let Self { guest, source, .. } = self;
        risk(
            Consequence::AsWithoutMove,
            format!("{guest} ends with {source}, as without a move"),
        )
    }

    fn ends_unless_complete(&self) -> Risk {
        let Self {
            guest,
            source,
            destination,
            ..
        } = self;
        risk(
            Consequence::AsWithoutMove,
            format!(
                "{guest} ends with {source}, as without a move, unless {destination} has all that \
                 it needs already, and runs it"
            ),
        )
    }

    fn doubt(&self) -> Risk {
        let Self {
            guest,
            source,
            destination,
            ..
        } = self;
        match self.arbitrated {
            true => risk(
                Consequence::Returns,
                format!(
                    "the arbiter ends the doubt within seconds: {guest} continues at {source}, or \
                     runs at {destination}"
                ),
            ),
            false => risk(
                Consequence::Pause,
                format!("{guest} is stopped until the hosts are connected again"),
            ),
        }
    }

    fn source_in_doubt(&self) -> Risk {
        let Self {
            guest, destination, ..
        } = self;
        match self.follows {
            Follows::Nothing => risk(
                Consequence::Decision,
                format!(
                    "{guest} runs at {destination} if it was told so; otherwise it waits there, \
                     complete, for an operator (`longhaul resolve`)"
                ),
            ),
            Follows::Perhaps => self.lost("if its memory or disks follow, "),
            Follows::Something => self.lost(""),
        }
    }

    fn lost(&self, when: &str) -> Risk {
        let Self { guest, source, .. } = self;
        risk(
            Consequence::Lost,
            format!("{when}{guest} is lost: what has not followed is only at {source}"),
        )
    }

    fn destination_in_doubt(&self) -> Risk {
        let Self { guest, source, .. } = self;
        match self.arbitrated {
            true => risk(
                Consequence::Returns,
                format!(
                    "{guest} continues at {source} within seconds, by the arbiter's lease; if the \
                     lost host has it, an operator decides (`longhaul resolve`)"
                ),
            ),
            false => risk(
                Consequence::Decision,
                format!(
                    "{guest} is stopped at {source}, complete, until an operator decides \
                     (`longhaul resolve`)"
                ),
            ),
        }
    }

    fn finishing(&self) -> [Risk; 3] {
        let Self {
            guest,
            source,
            destination,
            ..
        } = self;
        let runs_on = || {
            let text = format!("{guest} runs on at {destination}, and needs no other host");
            risk(Consequence::RunsOn, text)
        };
        let when = match self.follows {
            Follows::Nothing => {
                let text = format!("{guest} ends with {destination}, as without a move");
                return [runs_on(), runs_on(), risk(Consequence::AsWithoutMove, text)];
            }
            Follows::Perhaps => "if its memory or disks follow, ",
            Follows::Something => "",
        };
        let pause =
            format!("{when}{guest} waits for what is missing until the hosts are connected again");
        let taken_back = format!(
            "{guest} ends with {destination}; while something is missing there, an operator can \
             take it back at {source}, as it was when it was stopped"
        );
        [
            risk(Consequence::Pause, pause),
            self.lost(when),
            risk(Consequence::TakenBack, taken_back),
        ]
    }
}

fn risk(consequence: Consequence, text: String) -> Risk {
    Risk { consequence, text }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stakes() -> Stakes<'static> {
        Stakes {
            guest: "web-7",
            source: "lyon-1",
            destination: "paris-2",
            follows: Follows::Nothing,
            early_release: false,
            arbitrated: false,
            patience_ms: Some(60_000),
        }
    }

    /// Returns the consequences of a cut, and of the death of the source and of the destination.
    fn of(stakes: Stakes<'_>, phase: Phase) -> [Consequence; 3] {
        let risks = stakes.risks(phase);
        let all = [
            risks.if_link_is_cut,
            risks.if_source_dies,
            risks.if_destination_dies,
        ];
        all.map(|risk| risk.consequence)
    }

    #[test]
    fn a_guest_that_is_released_late_needs_one_host_at_a_time() {
        use Consequence as Is;
        let expected = [
            (Phase::Preparing, [Is::Stays, Is::AsWithoutMove, Is::Stays]),
            (Phase::Precopy, [Is::Retry, Is::AsWithoutMove, Is::Stays]),
            (
                Phase::Stopping,
                [Is::Returns, Is::AsWithoutMove, Is::Returns],
            ),
            (Phase::HandingOver, [Is::Pause, Is::Decision, Is::Decision]),
            (
                Phase::Finishing,
                [Is::RunsOn, Is::RunsOn, Is::AsWithoutMove],
            ),
        ];
        for (phase, consequences) in expected {
            assert_eq!(of(stakes(), phase), consequences, "{phase}");
        }
    }

    #[test]
    fn an_early_release_begins_the_doubt_at_the_stop() {
        let early = Stakes {
            early_release: true,
            ..stakes()
        };
        for phase in [Phase::Stopping, Phase::Loading, Phase::Verifying] {
            let [cut, source, destination] = of(early, phase);
            assert_eq!(cut, Consequence::Pause);
            assert_eq!(source, Consequence::AsWithoutMove);
            assert_eq!(destination, Consequence::Decision);
        }
        assert_eq!(
            of(early, Phase::Precopy),
            of(stakes(), Phase::Precopy),
            "nothing is released before the stop"
        );
    }

    #[test]
    fn an_arbiter_ends_the_doubt() {
        let arbitrated = Stakes {
            arbitrated: true,
            ..stakes()
        };
        let [cut, source, destination] = of(arbitrated, Phase::HandingOver);
        assert_eq!(
            (cut, destination),
            (Consequence::Returns, Consequence::Returns)
        );
        // It does not help a destination whose source is lost.
        assert_eq!(source, Consequence::Decision);
    }

    #[test]
    fn a_guest_whose_memory_follows_needs_both_hosts() {
        for follows in [Follows::Perhaps, Follows::Something] {
            let following = Stakes {
                follows,
                ..stakes()
            };
            assert_eq!(
                of(following, Phase::Finishing),
                [
                    Consequence::Pause,
                    Consequence::Lost,
                    Consequence::TakenBack
                ]
            );
            assert_eq!(of(following, Phase::HandingOver)[1], Consequence::Lost);
            let before = of(following, Phase::Loading);
            assert_eq!(before, of(stakes(), Phase::Loading));
        }
        let perhaps = Stakes {
            follows: Follows::Perhaps,
            ..stakes()
        };
        let text = perhaps.risks(Phase::Finishing).if_source_dies.text;
        assert!(text.starts_with("if its memory or disks follow"), "{text}");
    }
}
