//! Implements the program `lab`: emulated hosts, links and guests on one machine; demo and benches.

mod demo;
mod doctor;
mod history;
mod parcel_demo;
mod sites;
mod up;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use longhaul_lab::error::LabError;
use longhaul_lab::internet::access::Access;
use longhaul_lab::interrupt;
use longhaul_lab::lab::{HOST_NAMES, Plan, print, say};
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab_bench::{bench, results};
use longhaul_lab_crash as crash;
use longhaul_lab_guests as guests;
use longhaul_protocol::units::parse_duration;
use up::{Inhabitants, LinkChange};

/// Longhaul's laboratory: emulated hosts, links and guests on one machine. It needs root.
#[derive(Debug, Parser)]
#[command(name = "longhaul-lab", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Check what is installed, what is missing and how to install it; exit 1 if the demo cannot
    /// run
    Doctor,
    /// Move a running guest between sites behind NATs and back, beside QEMU's pre-copy (2 minutes)
    Demo,
    /// Ship the disks of three running guests on four devices, lose one, and move the guests over a
    /// slow link (4 minutes)
    DemoParcel,
    /// Create an interactive laboratory, and print how to reach its parts
    Up(UpArguments),
    /// Remove a laboratory made by `lab up`, and the remains of earlier ones
    Down {
        /// The laboratory, as `lab ls` names it
        id: Option<String>,
        /// All that were made by `lab up`
        #[arg(long, conflicts_with = "id")]
        all: bool,
    },
    /// List laboratories, in use or left over
    Ls,
    /// Show or change the links of a laboratory while it runs
    Link {
        /// The laboratory, as `lab ls` names it
        id: String,
        /// Change to another link, for example 50mbit,40ms
        #[arg(long, value_name = "SPEC", group = "change")]
        to: Option<LinkSpec>,
        /// Drop everything for this long, for example 5s
        #[arg(long, value_name = "TIME", value_parser = parse_duration, group = "change")]
        cut: Option<Duration>,
        /// End a cut
        #[arg(long, group = "change")]
        heal: bool,
    },
    /// Run a bench: measure, print rows and the checks computed from them
    Bench {
        /// The bench, as --list names it
        #[arg(required_unless_present = "list")]
        name: Option<String>,
        /// List the benches, what each compares, and how long it takes
        #[arg(long)]
        list: bool,
        /// With --list: only their names
        #[arg(long, requires = "list")]
        names: bool,
        #[command(flatten)]
        options: bench::Options,
    },
    /// Generate the page of results from the documents of benches: FOLDER/documents/*.json
    Results {
        /// The folder of the page, for example docs/benchmarks
        folder: PathBuf,
    },
    /// Draw a sample of a guest's memory from two raw snapshots, as an input of the benches
    Sample {
        /// Its name, and the files
        #[arg(value_name = "NAME=FIRST,LATER")]
        input: bench::codec::OwnInput,
        /// The folder of the sample
        folder: PathBuf,
        /// The seed of the choice of pages
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Cause a failure at every step of a move, and check that exactly one copy of the guest exists
    CrashMatrix(crash::Options),
    /// Move one guest back and forth, with failures in between, and check that nothing remains
    Soak(crash::soak::Options),
    /// Move guests with the QEMU command lines that people use: there, given up, and back
    Guests(guests::Options),
    /// Let a guest write to disks of its own, and check their content from outside
    #[command(subcommand)]
    History(history::Action),
}

#[derive(Debug, clap::Args)]
struct UpArguments {
    /// The number of hosts
    #[arg(
        long,
        default_value_t = 2,
        value_parser = clap::value_parser!(u8).range(1..=HOST_NAMES.len() as i64)
    )]
    hosts: u8,
    /// The link between every two of them: RATE,RTT, then loss=1%, jitter=2ms, queue=50ms
    #[arg(long, value_name = "SPEC", default_value = "100mbit,20ms")]
    link: LinkSpec,
    /// Sites on an Internet instead, with a server and a client; --link is each site's uplink. A
    /// site is none, full-cone, restricted, port-restricted, symmetric, no-udp or ipv6; KIND/KIND
    /// has a carrier's NAT behind the site's, KIND+ipv6 both protocols, 2*KIND two hosts
    #[arg(
        long,
        value_name = "KIND,KIND",
        value_delimiter = ',',
        conflicts_with = "hosts"
    )]
    nat: Vec<Access>,
    /// The seed of the random losses of a link
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Start a guest on the first host; `tiny` is the laboratory's own
    #[arg(long, value_name = "GUEST", value_parser = ["tiny"])]
    guest: Option<String>,
    /// Hosts and links only, without agents
    #[arg(long, conflicts_with = "guest")]
    bare: bool,
    /// The QEMU of all hosts: 7.2, 10.0, 11.1, or the path of a binary
    #[arg(long, value_name = "QEMU", default_value = "10.0")]
    qemu: String,
    /// Stay in the foreground until Ctrl-C
    #[arg(long)]
    foreground: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(arguments.command) {
        Ok(status) => status,
        Err(LabError::Interrupted) => ExitCode::from(130),
        Err(error) => {
            say(&format!("error: {error}"));
            ExitCode::from(2)
        }
    }
}

fn run(command: Action) -> Result<ExitCode, LabError> {
    interrupt::catch()?;
    match command {
        Action::Doctor => {
            let (report, demo_runs) = doctor::examine();
            print(&report)?;
            return Ok(ExitCode::from(u8::from(!demo_runs)));
        }
        Action::Demo => return demo::run(),
        Action::DemoParcel => return parcel_demo::run(),
        Action::Results { folder } => results::make(&folder)?,
        Action::Sample {
            input,
            folder,
            seed,
        } => print(&bench::codec::write_sample(&input, seed, &folder)?)?,
        Action::CrashMatrix(options) => return crash::command(&options),
        Action::Soak(options) => return crash::soak::command(&options),
        Action::Guests(options) => return guests::command(&options),
        Action::History(action) => return history::command(&action),
        Action::Up(arguments) if arguments.foreground => hold(arguments)?,
        Action::Up(_) => up::up(&std::env::args().skip(1).collect::<Vec<_>>())?,
        Action::Down { id, all } => up::down(id.as_deref(), all)?,
        Action::Ls => up::ls()?,
        Action::Bench {
            name,
            list,
            names,
            options,
        } => match name {
            Some(name) if !list => return bench::run(&name, &options),
            _ => bench::list(names)?,
        },
        Action::Link { id, to, cut, heal } => {
            let change = match (to, cut, heal) {
                (Some(spec), ..) => LinkChange::To(spec),
                (_, Some(time), _) => LinkChange::Cut(time),
                (.., true) => LinkChange::Heal,
                _ => LinkChange::Nothing,
            };
            up::change_links(&id, change)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Creates an interactive laboratory, and holds it until a signal requests the end.
fn hold(arguments: UpArguments) -> Result<(), LabError> {
    let inhabitants = Inhabitants {
        agents: !arguments.bare,
        guest: arguments.guest.is_some(),
        qemu: arguments.qemu,
    };
    if !arguments.nat.is_empty() {
        return sites::hold(arguments.nat, arguments.link, arguments.seed, &inhabitants);
    }
    let plan = Plan {
        purpose: String::new(),
        hosts: usize::from(arguments.hosts),
        link: arguments.link,
        seed: arguments.seed,
    };
    up::hold(plan, &inhabitants)
}
