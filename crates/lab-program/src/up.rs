//! Implements `lab up`, `lab down`, `lab ls` and `lab link`: interactive laboratories.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::{KernelFiles, Tiny};
use longhaul_lab::installed;
use longhaul_lab::interrupt;
use longhaul_lab::lab::{Lab, Plan, print, say};
use longhaul_lab::link::Control;
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::process::wait_until;
use longhaul_lab::product::{Product, Settings};
use longhaul_lab::registry::{self, Found, Record, Registry};

/// The purpose of interactive laboratories.
pub(crate) const TO_PLAY_WITH: &str = "up";
/// The name of the laboratory's own guest.
const GUEST_NAME: &str = "web-7";
/// The time limit for removing a laboratory with agents and a guest.
const DOWN_LIMIT: Duration = Duration::from_secs(30);

/// The processes on the hosts of an interactive laboratory.
#[derive(Debug, Clone)]
pub(crate) struct Inhabitants {
    /// Whether each host runs an agent.
    pub(crate) agents: bool,
    /// Whether a guest of the laboratory's own runs on the first host.
    pub(crate) guest: bool,
    /// The QEMU of all hosts: a version or a path.
    pub(crate) qemu: String,
}

/// Creates a laboratory and holds it until a signal requests the end. Its record is printed as one
/// line of JSON when it is ready.
///
/// # Errors
/// When it cannot be created, or its link differs from the requested one.
pub(crate) fn hold(mut plan: Plan, inhabitants: &Inhabitants) -> Result<(), LabError> {
    TO_PLAY_WITH.clone_into(&mut plan.purpose);
    let mut lab = Lab::create(&plan)?;
    if plan.hosts > 1 {
        let measured = lab.measure_link(plan.link)?;
        say(&format!(
            "link asked for {}: measured {:.1} Mbit/s, {:.1} ms round trip, {:.2} % lost",
            plan.link,
            measured.rate_bps / 1e6,
            measured.rtt_ms,
            measured.loss * 100.0
        ));
    }
    let product = start_agents(&mut lab, inhabitants)?;
    if let Some(product) = product.as_ref().filter(|_| inhabitants.guest) {
        start_guest(&mut lab, product, inhabitants, false)?;
    }
    stay(&lab)
}

/// Reports that a laboratory is ready, and holds it until a signal requests the end.
///
/// # Errors
/// When it cannot be reported.
pub(crate) fn stay(lab: &Lab) -> Result<(), LabError> {
    print_record(lab.record()).during(|| "tell that the laboratory is there".to_owned())?;
    while !interrupt::requested() {
        // Ends early at an interrupt, which the condition checks.
        let _ = interrupt::sleep(Duration::from_secs(3600));
    }
    Ok(())
}

/// Starts the agents that are asked for; a guest needs them too.
///
/// # Errors
/// When one does not start.
pub(crate) fn start_agents(
    lab: &mut Lab,
    inhabitants: &Inhabitants,
) -> Result<Option<Product>, LabError> {
    if !inhabitants.agents && !inhabitants.guest {
        return Ok(None);
    }
    let files = KernelFiles::make(lab.host(0)?.folder())?;
    let settings = Settings {
        qemus: vec![inhabitants.qemu.clone()],
        accelerator: "auto".to_owned(),
    };
    Product::start(lab, &files, &settings).map(Some)
}

/// Starts the laboratory's own guest on the first host. One that serves clients has a card in their
/// network.
///
/// # Errors
/// When it does not start.
pub(crate) fn start_guest(
    lab: &mut Lab,
    product: &Product,
    inhabitants: &Inhabitants,
    serves_clients: bool,
) -> Result<(), LabError> {
    let mut guest = Tiny::new(GUEST_NAME);
    let version = installed::qemu_version(&installed::qemu(&inhabitants.qemu)?)?;
    guest.machine_version = version.split('.').take(2).collect::<Vec<_>>().join(".");
    guest.serves_clients = serves_clients;
    product.start_guest(lab, 0, &guest.description())?;
    let name = lab.host(0)?.name().to_owned();
    lab.note_guest(&name, GUEST_NAME)
}

fn print_record(record: &Record) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    serde_json::to_writer(&mut stdout, record)?;
    stdout.write_all(b"\n")?;
    stdout.flush()
}

/// Starts a process that [`hold`]s a laboratory, and prints how to reach its parts.
///
/// # Errors
/// When it cannot be made.
pub(crate) fn up(arguments: &[String]) -> Result<(), LabError> {
    let program = std::env::current_exe().during(|| "find the running program".to_owned())?;
    let mut keeper = Command::new(program)
        .args(arguments)
        .arg("--foreground")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .during(|| "start the laboratory's keeper".to_owned())?;
    // Its output before the laboratory is ready is passed on. It must not inherit this command's
    // own standard error, or a reader of that would wait for the laboratory's end.
    let passing_on = keeper
        .stderr
        .take()
        .map(|mut stderr| thread::spawn(move || io::copy(&mut stderr, &mut io::stderr())));
    let mut line = String::new();
    if let Some(stdout) = keeper.stdout.take() {
        BufReader::new(stdout)
            .read_line(&mut line)
            .during(|| "wait for the laboratory".to_owned())?;
    }
    if let Ok(record) = serde_json::from_str::<Record>(&line) {
        return print(&describe(&record));
    }
    let _ = keeper.wait();
    if let Some(thread) = passing_on {
        // Its last output precedes the error; a missing reader is not another error.
        let _ = thread.join();
    }
    Err(LabError::Which(
        "no laboratory was made (the reason stands above)".to_owned(),
    ))
}

fn describe(record: &Record) -> String {
    let mut text = format!("laboratory {}\n", record.id);
    for host in &record.hosts {
        text += &format!(
            "  {:<8} {:<14} ip netns exec {} COMMAND\n",
            host.name, host.address, host.namespace
        );
        if let Some(place) = &host.place {
            text += &format!("  {:<8} {place}\n", "");
        }
        if let Some(api) = &host.api {
            text += &format!("  {:<23} longhaul --socket {} COMMAND\n", "", api.display());
        }
        if let Some(guest) = &host.guest {
            text += &format!(
                "  {:<23} guest {guest}: longhaul --socket SOCKET migrate {guest} --to HOST\n",
                ""
            );
        }
    }
    for link in &record.links {
        text += &format!(
            "  link {} - {}: {}\n",
            link.between[0], link.between[1], link.asked
        );
    }
    for line in &record.reach {
        text += &format!("  {line}\n");
    }
    text += &format!("remove it: lab down {}\n", record.id);
    text
}

/// Lists the laboratories of this machine, in use or left over.
///
/// # Errors
/// When the registry cannot be read.
pub(crate) fn ls() -> Result<(), LabError> {
    let all = Registry::of_this_machine().list()?;
    if all.is_empty() {
        return print("no laboratories\n");
    }
    let lines: String = all.iter().map(show).collect();
    print(&lines)
}

fn show(found: &Found) -> String {
    let state = if found.in_use { "in use" } else { "left over" };
    match &found.record {
        Some(record) => format!(
            "{}  {state:<9}  {} hosts{}, {}{}\n",
            found.id,
            record.hosts.len(),
            match record.routers.is_empty() {
                true => "",
                false => " on an Internet",
            },
            record.purpose,
            registry::owner_of(found)
                .map_or_else(String::new, |owner| format!(", process {}", owner.pid)),
        ),
        None => format!("{}  {state}\n", found.id),
    }
}

/// Removes one laboratory, or all leftovers and the interactive one.
///
/// # Errors
/// When there is none, or more than one, or it cannot be removed.
pub(crate) fn down(id: Option<&str>, all: bool) -> Result<(), LabError> {
    let registry = Registry::of_this_machine();
    let swept = registry.sweep()?;
    for id in &swept {
        say(&format!("removed what laboratory {id} had left"));
    }
    let in_use: Vec<Found> = registry
        .list()?
        .into_iter()
        .filter(|it| it.in_use)
        .collect();
    for found in choose(in_use, &swept, id, all)? {
        end(&registry, &found)?;
        say(&format!("removed laboratory {}", found.id));
    }
    Ok(())
}

/// Returns the laboratories to be removed; the remains of earlier ones are removed already.
fn choose(
    in_use: Vec<Found>,
    swept: &[String],
    id: Option<&str>,
    all: bool,
) -> Result<Vec<Found>, LabError> {
    let to_play_with =
        |found: &Found| matches!(&found.record, Some(record) if record.purpose == TO_PLAY_WITH);
    let chosen: Vec<Found> = match id {
        Some(id) => in_use.into_iter().filter(|found| found.id == id).collect(),
        None => in_use.into_iter().filter(to_play_with).collect(),
    };
    match id {
        Some(id) if chosen.is_empty() && !swept.iter().any(|swept| swept == id) => {
            Err(LabError::Which(format!(
                "there is no laboratory {id} (hint: lab ls lists them)"
            )))
        }
        None if chosen.len() > 1 && !all => {
            let ids: Vec<&str> = chosen.iter().map(|found| found.id.as_str()).collect();
            Err(LabError::Which(format!(
                "there are several laboratories; name one of {}, or say --all",
                ids.join(", ")
            )))
        }
        _ => Ok(chosen),
    }
}

/// Asks a laboratory's owner to end and waits until everything is removed.
fn end(registry: &Registry, found: &Found) -> Result<(), LabError> {
    if let Some(owner) = registry::owner_of(found) {
        // It may be gone already.
        let _ = kill(Pid::from_raw(owner.pid), Signal::SIGTERM);
        if !wait_until(DOWN_LIMIT, || !owner.is_alive()) {
            return Err(LabError::Which(format!(
                "laboratory {} does not end (hint: kill -9 {}; lab down)",
                found.id, owner.pid
            )));
        }
    }
    registry.sweep().map(drop)
}

/// A change of a laboratory's link.
#[derive(Debug, Clone, Copy)]
pub(crate) enum LinkChange {
    /// Drop everything for this long.
    Cut(Duration),
    /// End a cut.
    Heal,
    /// Change to another link.
    To(LinkSpec),
    /// Only print the counters.
    Nothing,
}

/// Changes the links of a laboratory, and prints their counters.
///
/// # Errors
/// When there is no such laboratory, or its links do not answer.
pub(crate) fn change_links(id: &str, change: LinkChange) -> Result<(), LabError> {
    let found = Registry::of_this_machine().list()?;
    let record = found
        .into_iter()
        .find(|found| found.id == id && found.in_use)
        .and_then(|found| found.record)
        .ok_or_else(|| LabError::Which(format!("there is no laboratory {id} (hint: lab ls)")))?;
    for link in &record.links {
        let control = Control::at(link.control.clone());
        match change {
            LinkChange::Cut(time) => control.cut(time)?,
            LinkChange::Heal => control.heal()?,
            LinkChange::To(spec) => control.change(spec)?,
            LinkChange::Nothing => {}
        }
        let stats = control.stats()?;
        for (from, to, counted) in [(0, 1, &stats.forth), (1, 0, &stats.back)] {
            print(&format!(
                "{} > {}: {} bytes carried, {} frames dropped (queue {}, loss {}, cut {}), \
                 late by {} us in 99 of 100 frames, {} us at most\n",
                link.between[from],
                link.between[to],
                counted.carried_bytes,
                counted.dropped_queue + counted.dropped_loss + counted.dropped_cut,
                counted.dropped_queue,
                counted.dropped_loss,
                counted.dropped_cut,
                counted.lateness.percentile_us(99.0).unwrap_or(0),
                counted.lateness.max_us(),
            ))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a laboratory in use, with this purpose.
    fn found(id: &str, purpose: &str) -> Found {
        let record = Record {
            id: id.to_owned(),
            purpose: purpose.to_owned(),
            owner: None,
            created_unix_s: 0,
            data: std::path::PathBuf::new(),
            hosts: Vec::new(),
            links: Vec::new(),
            clients: None,
            routers: Vec::new(),
            reach: Vec::new(),
        };
        Found {
            record: Some(record),
            id: id.to_owned(),
            in_use: true,
        }
    }

    #[test]
    fn a_laboratory_is_chosen_by_its_name_or_as_the_only_one_to_play_with() {
        let chosen = |to_play_with: &[&str], id: Option<&str>, all: bool| {
            let made = to_play_with.iter().map(|id| found(id, TO_PLAY_WITH));
            let in_use = made.chain([found("bench", "bench: disk")]).collect();
            let chosen = choose(in_use, &["swept".to_owned()], id, all);
            let ids = |chosen: Vec<Found>| chosen.into_iter().map(|one| one.id).collect::<Vec<_>>();
            chosen.map(ids).map_err(|error| error.to_string())
        };
        assert_eq!(chosen(&["a"], None, false).unwrap(), ["a"]);
        assert_eq!(chosen(&["a", "b"], None, true).unwrap(), ["a", "b"]);
        assert_eq!(chosen(&["a", "b"], Some("b"), false).unwrap(), ["b"]);
        assert_eq!(chosen(&["a"], Some("bench"), false).unwrap(), ["bench"]);
        for none in [
            chosen(&[], None, false),
            chosen(&["a"], Some("swept"), false),
        ] {
            assert_eq!(none.unwrap(), [""; 0]);
        }
        let several = chosen(&["a", "b"], None, false).unwrap_err();
        assert!(
            several.contains("name one of a, b, or say --all"),
            "{several}"
        );
        let unknown = chosen(&["a"], Some("c"), false).unwrap_err();
        assert!(unknown.contains("there is no laboratory c"), "{unknown}");
    }
}
