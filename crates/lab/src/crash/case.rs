//! A case of the matrix: who fails, where, with which QEMUs; all of them, and their names.

use super::point::{Point, Side, Step};
use crate::guest::disks::Format;
use std::fmt;

/// What fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Victim {
    /// The source's agent is killed.
    SourceAgent,
    /// The destination's agent is killed.
    DestinationAgent,
    /// Both are, as by a power cut of both sites.
    BothAgents,
    /// The guest's QEMU at the source is killed.
    SourceQemu,
    /// The guest's QEMU at the destination is killed.
    DestinationQemu,
    /// What answers the guest for its disk at the source is killed.
    SourceFront,
    /// The same at the destination, while a part of the disk may be missing there.
    DestinationFront,
    /// What keeps the source's front end answering is killed.
    SourceSupervisor,
    /// The same at the destination.
    DestinationSupervisor,
    /// The connection between the agents is closed.
    Connection,
    /// The link is cut for a while.
    Link,
    /// The record cannot be written, or is said not to have been.
    Record,
}

impl Victim {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::SourceAgent,
        Self::DestinationAgent,
        Self::BothAgents,
        Self::SourceQemu,
        Self::DestinationQemu,
        Self::SourceFront,
        Self::DestinationFront,
        Self::SourceSupervisor,
        Self::DestinationSupervisor,
        Self::Connection,
        Self::Link,
        Self::Record,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::SourceAgent => "source-agent",
            Self::DestinationAgent => "destination-agent",
            Self::BothAgents => "both-agents",
            Self::SourceQemu => "source-qemu",
            Self::DestinationQemu => "destination-qemu",
            Self::SourceFront => "source-front",
            Self::DestinationFront => "destination-front",
            Self::SourceSupervisor => "source-supervisor",
            Self::DestinationSupervisor => "destination-supervisor",
            Self::Connection => "connection",
            Self::Link => "link",
            Self::Record => "record",
        }
    }

    /// Whose agents are killed.
    pub fn agents(self) -> &'static [Side] {
        match self {
            Self::SourceAgent => &[Side::Source],
            Self::DestinationAgent => &[Side::Destination],
            Self::BothAgents => &[Side::Source, Side::Destination],
            _ => &[],
        }
    }

    /// Whose QEMU is killed.
    pub fn qemu(self) -> Option<Side> {
        match self {
            Self::SourceQemu => Some(Side::Source),
            Self::DestinationQemu => Some(Side::Destination),
            _ => None,
        }
    }

    /// Whose front end is killed, and which of its processes, by its part.
    pub fn front(self) -> Option<(Side, &'static str)> {
        match self {
            Self::SourceFront => Some((Side::Source, "tell")),
            Self::DestinationFront => Some((Side::Destination, "arrive")),
            Self::SourceSupervisor => Some((Side::Source, "supervise")),
            Self::DestinationSupervisor => Some((Side::Destination, "supervise")),
            _ => None,
        }
    }
}

/// The QEMUs of both hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pair {
    /// 7.2 on both.
    Old,
    /// 10.0 on both.
    New,
    /// From 7.2 to 10.0.
    OldToNew,
    /// 11.1 on both.
    Newest,
}

impl Pair {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Old, Self::New, Self::OldToNew, Self::Newest];
    /// Those of the matrix; the others are tried where they are named.
    pub const OF_MATRIX: [Self; 3] = [Self::Old, Self::New, Self::OldToNew];

    /// The versions, by host.
    pub fn versions(self) -> [&'static str; 2] {
        match self {
            Self::Old => ["7.2", "7.2"],
            Self::New => ["10.0", "10.0"],
            Self::OldToNew => ["7.2", "10.0"],
            Self::Newest => ["11.1", "11.1"],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Old => "7.2",
            Self::New => "10.0",
            Self::OldToNew => "7.2-10.0",
            Self::Newest => "11.1",
        }
    }
}

/// When the source gives the guest up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Release {
    /// When the destination has everything.
    Late,
    /// When the guest is stopped.
    Early,
}

/// How long what fails stays away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Back {
    /// It is back at once; a link after a second.
    AtOnce,
    /// It is back when the other side has noticed, and given up or fallen into doubt.
    Later,
}

/// Where the guest's disk is, and how it moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Disks {
    /// Both hosts see it.
    Shared,
    /// Each host has its own; all is there when the guest stops.
    Precopy,
    /// Each host has its own; the guest's writes wait for both.
    Mirror,
    /// Each host has its own; what the guest writes often comes when it runs at the destination.
    Hybrid,
    /// Each host has its own; all of it comes then.
    Postcopy,
}

impl Disks {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Shared,
        Self::Precopy,
        Self::Mirror,
        Self::Hybrid,
        Self::Postcopy,
    ];

    /// Whether something may be left at the source when the guest runs at the destination.
    pub fn leaves(self) -> bool {
        matches!(self, Self::Hybrid | Self::Postcopy)
    }

    /// The word for it, as moves are asked for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::Precopy => "precopy",
            Self::Mirror => "mirror",
            Self::Hybrid => "hybrid",
            Self::Postcopy => "postcopy",
        }
    }
}

/// What the hosts have to be for a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Site {
    /// Their QEMUs.
    pub pair: Pair,
    /// Whether those lock the guest's disk.
    pub locks: bool,
    /// What the guest's image is where each has its own; none where both see one.
    pub own: Option<Format>,
}

impl Site {
    /// All of them.
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for pair in Pair::ALL {
            for locks in [false, true] {
                let own = [None, Some(Format::Raw), Some(Format::Qcow2)];
                all.extend(own.map(|own| Self { pair, locks, own }));
            }
        }
        all
    }
}

/// What a case is beside its point: what pairs of are covered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Kind {
    /// What fails.
    pub victim: Victim,
    /// In which part of a move.
    pub step: Step,
    /// When the source gives the guest up.
    pub release: Release,
    /// The QEMUs.
    pub pair: Pair,
    /// Whether QEMU locks the guest's disk; a lock could hide a second copy.
    pub locks: bool,
    /// How long it stays away.
    pub back: Back,
    /// The guest's disk.
    pub disks: Disks,
    /// What its image is.
    pub format: Format,
}

impl Kind {
    /// Where it is tried.
    pub fn site(&self) -> Site {
        Site {
            pair: self.pair,
            locks: self.locks,
            own: (self.disks != Disks::Shared).then_some(self.format),
        }
    }
}

/// One case.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Case {
    /// What it is beside its point.
    pub kind: Kind,
    /// Where it fails.
    pub point: Point,
}

impl fmt::Display for Case {
    /// The name by which `--only` runs it alone.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Kind {
            victim,
            pair,
            locks,
            back,
            release,
            disks,
            format,
            ..
        } = self.kind;
        write!(
            f,
            "{}:{}:{}:{}:{}:{}:{}:{}",
            victim.name(),
            self.point.name,
            pair.name(),
            match release {
                Release::Late => "late",
                Release::Early => "early",
            },
            if locks { "locks-on" } else { "locks-off" },
            match back {
                Back::AtOnce => "at-once",
                Back::Later => "later",
            },
            format.name(),
            disks.name()
        )
    }
}

impl Case {
    /// Whether both copies are compared: where the point asks for it, and where the hand-over begins
    /// after the comparison, with one pair of QEMUs. Who comes back there must not ask for it again.
    pub fn compares(&self) -> bool {
        let Kind {
            step,
            pair,
            release,
            ..
        } = self.kind;
        let after = matches!(
            step,
            Step::Ready | Step::Released | Step::Committed | Step::Recovering
        );
        let chosen = pair == Pair::OldToNew && release == Release::Late;
        self.point.needs_verify() || (after && chosen)
    }

    /// Whether there is such a case: whether there is what is to fail, and a difference to make.
    fn is_sound(&self) -> bool {
        let Kind {
            victim,
            step,
            release,
            locks,
            back,
            disks,
            format,
            ..
        } = self.kind;
        let fits = match victim {
            Victim::SourceAgent | Victim::DestinationAgent | Victim::BothAgents => true,
            // There are front ends from the offer on, and at the destination only where something is left.
            Victim::SourceFront | Victim::SourceSupervisor => {
                disks != Disks::Shared && has_fronts(step)
            }
            Victim::DestinationFront | Victim::DestinationSupervisor => {
                disks.leaves() && has_fronts(step)
            }
            Victim::SourceQemu => !matches!(step, Step::Asking | Step::Done),
            Victim::DestinationQemu => !matches!(
                step,
                Step::Asking | Step::Offering | Step::Cancelling | Step::Refusing | Step::Returning
            ),
            Victim::Connection => self.point.is_message(),
            Victim::Link => step != Step::Asking,
            Victim::Record => self.point.is_record(),
        };
        // What stays away longer is noticed where somebody waits for it.
        let waits = match victim {
            Victim::SourceAgent | Victim::DestinationAgent | Victim::BothAgents => true,
            Victim::Link => matches!(
                step,
                Step::Ready | Step::Released | Step::Committed | Step::Pulling
            ),
            _ => false,
        };
        // A lock held by somebody else is what makes QEMU refuse; where something is left, the front end has the lock
        // from the beginning.
        let refuses = step != Step::Returning || (locks && !disks.leaves());
        // What comes before the stop is the same; READY is left out.
        let passes = match release {
            Release::Late => true,
            Release::Early => {
                matches!(
                    step,
                    Step::Stopped
                        | Step::Ready
                        | Step::Released
                        | Step::Committed
                        | Step::Pulling
                        | Step::Done
                ) && !self.point.name.ends_with(":ready")
            }
        };
        let told = match disks {
            Disks::Shared => !self.point.needs_local_disks(),
            _ => !self.point.needs_shared_disks(),
        };
        // Little is left of a disk that moves with hybrid: the guest need not come across it, and of an image that
        // grows it is not known where it is.
        let left = match (step, disks) {
            (Step::Pulling, Disks::Hybrid) => {
                format == Format::Raw && !self.point.needs_the_guest()
            }
            (Step::Pulling, _) => disks.leaves(),
            _ => true,
        };
        // One that both hosts see is not touched, whatever it is.
        let made = disks != Disks::Shared || format == Format::Raw;
        let met = passes && told && left && made && step != Step::Elsewhere;
        met && fits && refuses && (waits || back == Back::AtOnce)
    }
}

/// Every case of the matrix.
pub fn universe(points: &[Point]) -> Vec<Case> {
    universe_of(points, &Pair::OF_MATRIX)
}

/// Every case with these QEMUs.
pub fn universe_of(points: &[Point], pairs: &[Pair]) -> Vec<Case> {
    let mut cases = Vec::new();
    for victim in Victim::ALL {
        for point in points {
            for &pair in pairs {
                cases.extend(variants(victim, point, pair));
            }
        }
    }
    cases.retain(Case::is_sound);
    cases
}

/// Whether a move of local disks has front ends all through this part of it.
fn has_fronts(step: Step) -> bool {
    matches!(
        step,
        Step::Sending
            | Step::Stopped
            | Step::Ready
            | Step::Released
            | Step::Committed
            | Step::Pulling
    )
}

/// In which part of a move a point lies when disks move in this way: what is left comes over a connection
/// that is made again.
fn step_of(point: &Point, disks: Disks) -> Step {
    match point.step {
        Step::Resuming if disks.leaves() => Step::Pulling,
        step => step,
    }
}

fn of_every_format(disks: Disks) -> [(Disks, Format); 2] {
    [Format::Raw, Format::Qcow2].map(|format| (disks, format))
}

/// A victim at a point with a pair of QEMUs, in every way.
fn variants(victim: Victim, point: &Point, pair: Pair) -> Vec<Case> {
    let mut cases = Vec::new();
    for locks in [false, true] {
        for back in [Back::AtOnce, Back::Later] {
            for release in [Release::Late, Release::Early] {
                for (disks, format) in Disks::ALL.into_iter().flat_map(of_every_format) {
                    let kind = Kind {
                        victim,
                        step: step_of(point, disks),
                        release,
                        pair,
                        locks,
                        back,
                        disks,
                        format,
                    };
                    let point = point.clone();
                    cases.push(Case { kind, point });
                }
            }
        }
    }
    cases
}

/// Every victim at every point: with every pair of QEMUs and a late release, and with a pair of its
/// turn and an early one. Locks, the time away, disks and what their images are alternate.
pub fn all(mut universe: Vec<Case>) -> Vec<Case> {
    // Stable: the order of a move stays.
    universe.sort_by_key(|case| (case.kind.release, case.kind.victim));
    let alike = |one: &Case, next: &Case| key(one) == key(next);
    let mut chosen = Vec::new();
    for (number, same) in universe.chunk_by(alike).enumerate() {
        chosen.extend(same.get(number % same.len()).cloned());
    }
    chosen
}

/// What differs between two cases of `all`.
fn key(case: &Case) -> (Release, Victim, String, Option<Pair>) {
    let kind = case.kind;
    let pair = (kind.release == Release::Late).then_some(kind.pair);
    (kind.release, kind.victim, case.point.name.clone(), pair)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn points() -> Vec<Point> {
        let names = [
            "source:before-send:offer",
            "destination:before-record:ready",
            "source:after-record:released",
        ];
        names.map(|name| Point::named(name).unwrap()).to_vec()
    }

    #[test]
    fn every_victim_meets_every_point_with_every_pair() {
        let universe = universe(&points());
        let all = all(universe.clone());
        let keys = |cases: &[Case]| -> HashSet<_> { cases.iter().map(key).collect() };
        assert_eq!(keys(&all), keys(&universe));
        assert_eq!(keys(&all).len(), all.len());
        let off = all.iter().filter(|case| !case.kind.locks).count();
        assert!(off * 3 >= all.len(), "{off} of {}", all.len());
        let grows = |case: &&Case| case.kind.format == Format::Qcow2;
        let grow = all.iter().filter(grows).count();
        assert!(grow * 3 >= all.len(), "{grow} of {}", all.len());
    }

    #[test]
    fn the_hand_over_is_tried_with_and_without_a_comparison_before_it() {
        let all = all(universe(&points()));
        for point in [
            "destination:before-record:ready",
            "source:after-record:released",
        ] {
            let late = |case: &&Case| {
                case.point.name == point
                    && case.kind.victim == Victim::DestinationAgent
                    && case.kind.release == Release::Late
            };
            let compared: HashSet<bool> = all.iter().filter(late).map(Case::compares).collect();
            let both = point.ends_with("released");
            assert_eq!(compared.contains(&true), both, "{point}");
            assert!(compared.contains(&false), "{point}");
        }
    }

    #[test]
    fn names_are_different() {
        let universe = universe(&points());
        let names: HashSet<String> = universe.iter().map(Case::to_string).collect();
        assert_eq!(names.len(), universe.len());
        assert!(names.contains(
            "source-agent:source:after-record:released:7.2-10.0:early:locks-off:later:qcow2:mirror"
        ));
    }
}
