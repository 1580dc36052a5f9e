//! Defines all possible next steps.

use crate::machine::{Left, Setting};
use crate::variant::Variant;
use crate::world::{ATTEMPTS, Budget, DESTINATION, Message, SOURCE};

/// The end of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// As expected.
    Well,
    /// A write failed, and nothing of it is on disk.
    FailedLost,
    /// A write failed, and the record is on disk nevertheless.
    FailedDurable,
    /// A write failed, and the record that another one left on disk is still there.
    FailedKept,
    /// QEMU refused.
    Refused,
    /// QEMU ended instead.
    Died,
}

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// A migration is requested.
    Begin { host: usize, arbitrated: bool },
    /// A side asks the arbiter for its lease, and hears the answer or not.
    Claim {
        index: usize,
        side: usize,
        answered: bool,
    },
    /// A source writes the next record of an attempt that it has yet to offer.
    Prepare { index: usize, ending: Ending },
    /// An agent executes the next of its actions.
    Act {
        index: usize,
        side: usize,
        ending: Ending,
    },
    /// A message is received; `again` when it will arrive once more.
    Deliver { bit: u8, again: bool },
    /// The source reaches the destination, again or for the first time since a restart.
    Connect { index: usize },
    /// An operator, a limit or a time-out ends the attempt at one side.
    Abort { index: usize, side: usize },
    /// An agent sees that its QEMU has ended, or the guest in it.
    SeeGone { index: usize, side: usize },
    /// An agent retries a failed write.
    Retry { index: usize, side: usize },
    /// The destination needs nothing more of the source.
    AllPresent { index: usize },
    /// An operator declares the other host dead, and gives the guest to this one.
    Overrule { index: usize, side: usize },
    /// An operator gives up the blocks that only the source has, which is dead.
    GiveUp { index: usize },
    /// The destination's agent starts a page server for a QEMU whose post-copy is paused.
    Serve { index: usize },
    /// The source sends a page of memory, and the page server takes it.
    Give { index: usize },
    /// The page server gives QEMU the page.
    Place { index: usize },
    /// The memory file becomes complete.
    Keep { index: usize },
    /// The source tells the destination that it cannot read the page.
    SayLost { index: usize },
    /// A page server is killed.
    KillServer { index: usize },
    /// An operator takes the right back from a host that never returns.
    Reclaim { host: usize },
    /// A lost host never returns.
    Bury { host: usize },
    /// Another machine takes the place of a host whose agent is down; what runs on the old one goes
    /// on.
    Replace { host: usize },
    /// An agent dies; QEMU lives on.
    Crash { host: usize },
    /// An agent starts again.
    Restart { host: usize },
    /// A host is lost with everything that runs there.
    Lose { host: usize },
    /// The journals of a host whose agent is down are lost; what runs there goes on.
    Forget { host: usize },
    /// The source stops the guest.
    Stop { index: usize },
    /// QEMU converges by itself, before it is told to stop.
    Converge { index: usize },
    /// SHUT(0): QEMU goes to `postmigrate`.
    ShutAndStay { index: usize },
    /// SHUT(1): QEMU lets the guest go on, for another pass.
    ShutAndResume { index: usize },
    /// The source reports that everything has been sent.
    Complete { index: usize },
    /// QEMU sees that its migration's socket is gone.
    LoseSocket { host: usize },
    /// QEMU ends.
    Die { host: usize },
    /// The guest panics or powers off.
    Halt { host: usize },
    /// An operator starts the guest, which is down.
    Boot { host: usize },
}

/// Returns the steps that a setting and a budget allow at all.
pub(crate) fn possible_steps(setting: &Setting, budget: &Budget) -> Vec<Step> {
    let mut steps = all_steps();
    steps.retain(|step| step.is_possible(setting, budget));
    steps
}

fn all_steps() -> Vec<Step> {
    let mut steps = Vec::new();
    for host in 0..2 {
        steps.extend([
            Step::Begin {
                host,
                arbitrated: false,
            },
            Step::Begin {
                host,
                arbitrated: true,
            },
            Step::Crash { host },
            Step::Restart { host },
            Step::Lose { host },
            Step::Forget { host },
            Step::Bury { host },
            Step::Replace { host },
            Step::Reclaim { host },
            Step::LoseSocket { host },
            Step::Die { host },
            Step::Halt { host },
            Step::Boot { host },
        ]);
    }
    for index in 0..ATTEMPTS {
        steps.extend([
            Step::Connect { index },
            Step::AllPresent { index },
            Step::GiveUp { index },
            Step::Serve { index },
            Step::Give { index },
            Step::Place { index },
            Step::Keep { index },
            Step::SayLost { index },
            Step::KillServer { index },
            Step::Stop { index },
            Step::Converge { index },
            Step::ShutAndStay { index },
            Step::ShutAndResume { index },
            Step::Complete { index },
        ]);
        let endings = [
            Ending::Well,
            Ending::FailedLost,
            Ending::FailedDurable,
            Ending::FailedKept,
        ];
        steps.extend(endings.map(|ending| Step::Prepare { index, ending }));
        for side in [SOURCE, DESTINATION] {
            let endings = [
                Ending::Well,
                Ending::FailedLost,
                Ending::FailedDurable,
                Ending::FailedKept,
                Ending::Refused,
                Ending::Died,
            ];
            let act = |ending| Step::Act {
                index,
                side,
                ending,
            };
            steps.extend(endings.map(act));
            steps.extend([
                Step::Abort { index, side },
                Step::SeeGone { index, side },
                Step::Retry { index, side },
                Step::Overrule { index, side },
            ]);
            steps.extend([false, true].map(|answered| Step::Claim {
                index,
                side,
                answered,
            }));
        }
        for message in Message::ALL {
            let bit = message.bit(index);
            steps.extend([false, true].map(|again| Step::Deliver { bit, again }));
        }
    }
    steps
}

const HOSTS: [&str; 2] = ["A", "B"];
const SIDES: [&str; 2] = ["the source", "the destination"];

impl Ending {
    fn tell(self) -> &'static str {
        match self {
            Ending::Well => "",
            Ending::FailedLost => ": it fails",
            Ending::FailedDurable => ": it fails, but is on disk",
            Ending::FailedKept => ": it fails, and what failed before is still on disk",
            Ending::Refused => ": QEMU refuses",
            Ending::Died => ": QEMU ends",
        }
    }
}

impl Step {
    fn is_possible(self, setting: &Setting, budget: &Budget) -> bool {
        let fails = |ending| match ending {
            Ending::Well => true,
            Ending::FailedLost | Ending::FailedDurable | Ending::FailedKept => {
                budget.failed_writes > 0
            }
            Ending::Refused | Ending::Died => budget.surprises > 0,
        };
        let begun = |index| index < setting.attempts;
        match self {
            Step::Act { index, ending, .. } | Step::Prepare { index, ending } => {
                begun(index) && fails(ending)
            }
            Step::Retry { index, .. } => {
                begun(index) && (budget.failed_writes > 0 || budget.surprises > 0)
            }
            Step::Deliver { bit, again } => {
                begun(Message::of(bit).1) && (budget.duplicates > 0 || !again)
            }
            Step::GiveUp { index } => begun(index) && setting.drains(),
            Step::Serve { index } | Step::KillServer { index } => {
                begun(index) && setting.follows() && budget.servers > 0
            }
            Step::Give { index } | Step::Place { index } | Step::SayLost { index } => {
                begun(index) && setting.follows()
            }
            Step::Keep { index } => begun(index) && setting.left == Left::Memory { keeps: true },
            Step::Overrule { index, .. } => begun(index) && budget.lost_hosts > 0,
            Step::Connect { index }
            | Step::Abort { index, .. }
            | Step::SeeGone { index, .. }
            | Step::AllPresent { index }
            | Step::Stop { index }
            | Step::Converge { index }
            | Step::ShutAndStay { index }
            | Step::ShutAndResume { index }
            | Step::Complete { index } => begun(index),
            Step::Crash { host } => budget.crashes[host] > 0,
            Step::Lose { .. } => budget.lost_hosts > 0,
            Step::Bury { .. } => budget.buried > 0,
            Step::Forget { .. } => budget.lost_journals > 0,
            Step::Replace { .. } => budget.replaced > 0,
            Step::Die { .. } | Step::Halt { .. } => budget.surprises > 0,
            Step::Boot { .. } => budget.boots > 0,
            Step::Claim { index, .. } => begun(index) && setting.arbiter,
            // With one attempt, those without the arbiter are explored elsewhere.
            Step::Begin { arbitrated, .. } => match arbitrated {
                true => setting.arbiter,
                false => {
                    let plain = setting.variant == Variant::PlainReleaseClaimed;
                    !setting.arbiter || setting.attempts > 1 || plain
                }
            },
            Step::Restart { .. } | Step::Reclaim { .. } | Step::LoseSocket { .. } => true,
        }
    }

    /// Returns whether it is an action of this side (attempt, side, host), or the end of its host's
    /// agent.
    pub(crate) fn is_of(self, (of, at, home): (usize, usize, usize)) -> bool {
        match self {
            Step::Act { index, side, .. } => (index, side) == (of, at),
            Step::Prepare { index, .. } => (index, SOURCE) == (of, at),
            Step::Crash { host } | Step::Lose { host } => host == home,
            _ => false,
        }
    }

    /// Returns a readable form.
    pub(crate) fn tell(self) -> String {
        match self {
            Step::Begin { host, arbitrated } => {
                let with = if arbitrated { ", with the arbiter" } else { "" };
                format!("{}: a migration is asked for{with}", HOSTS[host])
            }
            Step::Claim {
                index,
                side,
                answered,
            } => {
                let lost = if answered { "" } else { ": its answer is lost" };
                format!("{}: {} asks the arbiter{lost}", index + 1, SIDES[side])
            }
            Step::Prepare { index, ending } => {
                format!("{}: the source prepares{}", index + 1, ending.tell())
            }
            Step::Act {
                index,
                side,
                ending,
            } => format!("{}: {} acts{}", index + 1, SIDES[side], ending.tell()),
            Step::Deliver { bit, again } => {
                let (message, index) = Message::of(bit);
                let again = if again { ", and will again" } else { "" };
                let to = SIDES[message.to()];
                format!("{}: {message:?} reaches {to}{again}", index + 1)
            }
            Step::Connect { index } => format!("{}: the source connects and asks", index + 1),
            Step::Abort { index, side } => format!("{}: abort at {}", index + 1, SIDES[side]),
            Step::SeeGone { index, side } => {
                format!(
                    "{}: {} sees that its guest has ended",
                    index + 1,
                    SIDES[side]
                )
            }
            Step::Retry { index, side } => {
                format!("{}: {} tries the write again", index + 1, SIDES[side])
            }
            Step::AllPresent { index } => format!("{}: everything is there", index + 1),
            Step::Overrule { index, side } => {
                format!("{}: a person decides for {}", index + 1, SIDES[side])
            }
            Step::GiveUp { index } => format!("{}: a person gives up what is missing", index + 1),
            Step::Serve { index } => format!("{}: a new page server serves QEMU", index + 1),
            Step::Give { index } => format!("{}: the page server is given the page", index + 1),
            Step::Place { index } => format!("{}: QEMU is given the page", index + 1),
            Step::Keep { index } => format!("{}: the memory file is complete", index + 1),
            Step::SayLost { index } => format!("{}: the page is said to be lost", index + 1),
            Step::KillServer { index } => format!("{}: the page server is killed", index + 1),
            Step::Reclaim { host } => format!("{}: a person takes the right back", HOSTS[host]),
            Step::Bury { host } => format!("{}: the host never returns", HOSTS[host]),
            Step::Replace { host } => format!("{}: another machine is there", HOSTS[host]),
            Step::Crash { host } => format!("{}: the agent dies", HOSTS[host]),
            Step::Restart { host } => format!("{}: the agent starts", HOSTS[host]),
            Step::Lose { host } => format!("{}: the host is lost", HOSTS[host]),
            Step::Forget { host } => format!("{}: the journals are lost", HOSTS[host]),
            Step::Stop { index } => format!("{}: stop", index + 1),
            Step::Converge { index } => format!("{}: QEMU converges by itself", index + 1),
            Step::ShutAndStay { index } => format!("{}: SHUT(0), postmigrate", index + 1),
            Step::ShutAndResume { index } => format!("{}: SHUT(1), the guest goes on", index + 1),
            Step::Complete { index } => format!("{}: everything is sent", index + 1),
            Step::LoseSocket { host } => format!("{}: QEMU sees its socket lost", HOSTS[host]),
            Step::Die { host } => format!("{}: QEMU ends", HOSTS[host]),
            Step::Halt { host } => format!("{}: the guest panics or powers off", HOSTS[host]),
            Step::Boot { host } => format!("{}: a person starts the guest", HOSTS[host]),
        }
    }
}
