//! Tests that a plan shows every refusal that `migrate` would meet: for each, both commands say the
//! same, and nothing has begun. The workspace checks hold a list of all refusals in the code, with
//! the test that shows each of them in a plan.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Agent, free_address};
use serde_json::Value;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

const GUEST: &str = "name = \"web-7\"\nmachine = \"pc-q35-7.2\"\ncpu = \"qemu64\"\nvcpus = 1\n\
                     memory_mib = 64\nchannels = [{ name = \"arena\" }]\n\
                     disks = [{ name = \"vda\", image = \"disk\" }]\n\
                     nics = [{ network = \"office\", mac = \"52:54:00:00:00:07\" }]\n";
/// Larger than the file system of the destination that has no room for it.
const DISK_BYTES: usize = 8 << 20;

/// A host whose configuration changes from case to case.
struct Host {
    agent: Agent,
    name: &'static str,
    address: String,
}

impl Drop for Host {
    fn drop(&mut self) {
        // It may not run here.
        self.agent.longhaul(&["guests", "stop", "--force", "web-7"]);
    }
}

/// The tables after the ones that every host has.
#[derive(Clone)]
struct Tables {
    disk: PathBuf,
    format: &'static str,
    networks: &'static str,
    more: String,
}

impl Tables {
    fn of(folder: &Path) -> Self {
        Self {
            disk: folder.join("images/disk.raw"),
            format: "raw",
            networks: "office = \"none\"",
            more: String::new(),
        }
    }

    fn text(&self) -> String {
        let Self {
            disk,
            format,
            networks,
            more,
        } = self;
        format!(
            "[images.disk]\npath = {disk:?}\nformat = {format:?}\ndirect = false\n\
             [networks]\n{networks}\n{more}\n"
        )
    }
}

impl Host {
    fn start(name: &'static str) -> Self {
        let address = free_address();
        let agent = Agent::start_configured(|folder| {
            fs::create_dir(folder.join("images")).unwrap();
            common::host(name, &address, folder) + &Tables::of(folder).text()
        });
        Self {
            agent,
            name,
            address,
        }
    }

    fn folder(&self) -> &Path {
        self.agent.folder.path()
    }

    fn disk(&self) -> PathBuf {
        Tables::of(self.folder()).disk
    }

    /// Restarts the agent with another configuration.
    fn configure(&mut self, change: impl FnOnce(&mut Tables)) {
        let mut tables = Tables::of(self.folder());
        change(&mut tables);
        let text = common::host(self.name, &self.address, self.folder()) + &tables.text();
        fs::write(self.folder().join("agent.toml"), text).unwrap();
        self.restart();
    }

    fn restart(&mut self) {
        self.agent.end(nix::sys::signal::Signal::SIGTERM);
        self.agent.restart();
    }

    fn trust(&self, other: &Self, may: &str) {
        let fingerprint = other.agent.json(&["host"])["fingerprint"].clone();
        let fingerprint = fingerprint.as_str().unwrap();
        let trust = ["host", "trust", other.name, fingerprint, &other.address];
        self.agent.succeed(&[&trust[..], &["--may", may]].concat());
    }

    fn start_guest(&self, description: &str) {
        let file = self.folder().join("web-7.toml");
        fs::write(&file, description).unwrap();
        let file = file.display().to_string();
        self.agent.succeed(&["guests", "start", &file]);
    }

    fn stop_guest(&self) {
        self.agent.succeed(&["guests", "stop", "--force", "web-7"]);
    }

    fn journals(&self) -> usize {
        fs::read_dir(self.folder().join("s/journal"))
            .unwrap()
            .count()
    }
}

/// Two hosts, and a guest with a disk and a card on the first.
struct Stage {
    lyon: Host,
    paris: Host,
}

impl Stage {
    fn new() -> Self {
        let (lyon, paris) = (Host::start("lyon-1"), Host::start("paris-2"));
        lyon.trust(&paris, "query,send");
        paris.trust(&lyon, "query,send");
        fs::write(lyon.disk(), vec![1; DISK_BYTES]).unwrap();
        lyon.start_guest(GUEST);
        Self { lyon, paris }
    }

    /// Returns the texts of all checks that refuse the move, and of the error, if there is one.
    fn refusals(&self) -> Vec<String> {
        let plan = ["--json", "plan", "web-7", "--to", "paris-2"];
        let output = self.lyon.agent.longhaul(&plan);
        let Ok(plan) = serde_json::from_slice::<Value>(&output.stdout) else {
            return vec![words(&output.stderr)];
        };
        let checks = plan["checks"].as_array().cloned().unwrap_or_default();
        let refuse = checks.iter().filter(|check| check["verdict"] == "refuse");
        let texts: Vec<String> = refuse
            .map(|check| check["message"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(plan["possible"], texts.is_empty(), "{plan}");
        assert_eq!(
            output.status.code(),
            Some(if texts.is_empty() { 0 } else { 3 })
        );
        texts
    }

    /// Checks that a plan refuses the move for this reason, and that `migrate` does, before
    /// anything has begun.
    fn refused(&self, why: &str) {
        let refusals = self.refusals();
        assert!(
            refusals.iter().any(|text| text.contains(why)),
            "the plan lacks {why:?}: {refusals:#?}\n{}",
            self.paris.agent.log()
        );
        let journals = (self.lyon.journals(), self.paris.journals());
        let migrate = ["migrate", "web-7", "--to", "paris-2"];
        let output = self.lyon.agent.longhaul(&migrate);
        let said = words(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{why}: {said}");
        // `migrate` names one reason, and the plan all of them.
        assert!(
            refusals.iter().any(|text| said.contains(text.as_str())),
            "migrate says something else than the plan ({refusals:#?}): {said}"
        );
        assert_eq!(
            journals,
            (self.lyon.journals(), self.paris.journals()),
            "{why}: a move has begun"
        );
    }

    /// Checks that nothing refuses the move.
    fn fits(&self) {
        assert_eq!(self.refusals(), Vec::<String>::new());
    }
}

/// Returns a text without its line breaks.
fn words(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_plan_shows_what_the_images_of_the_destination_refuse() {
    let mut stage = Stage::new();
    stage.fits();
    let there = stage.paris.disk();
    let paris = &mut stage.paris;
    paris.configure(|tables| tables.disk = there.with_file_name("other/disk.raw"));
    stage.refused("has no folder for the image disk");
    stage
        .paris
        .configure(|tables| tables.disk = "/dev/longhaul-absent".into());
    stage.refused("would have to make a volume for the image disk");
    stage.paris.configure(|tables| tables.format = "qcow2");
    stage.refused("has another format for disk vda");
    stage.paris.configure(|_| ());
    File::create(&there).unwrap();
    stage.refused("has a file already at the path of");
    fs::remove_file(&there).unwrap();
    stage.fits();
    let text = stage.paris.folder().join("agent.toml");
    let config = fs::read_to_string(&text).unwrap();
    fs::write(&text, config.replace("[images.disk]", "[images.other]")).unwrap();
    stage.paris.restart();
    stage.refused("image disk");
    stage
        .paris
        .configure(|tables| tables.networks = "dmz = \"none\"");
    stage.refused("it has no network called office");
}

#[test]
fn a_plan_shows_the_limits_of_the_source_at_the_destination() {
    let mut stage = Stage::new();
    for (limit, why) in [
        (
            "images = []",
            "does not let guests of lyon-1 use disk (images)",
        ),
        (
            "networks = []",
            "does not let guests of lyon-1 use office (networks)",
        ),
        ("guests = 0", "have 0 guests here"),
        ("arriving = 0", "have 0 guests on their way at once"),
        (
            "memory = \"32MiB\"",
            "have guests with 32 MiB of memory here",
        ),
        ("vcpus = 0", "have guests with 0 virtual CPUs here"),
        ("attempts_per_hour = 0", "begin 0 moves an hour"),
    ] {
        let more = format!("[limits]\n{limit}");
        stage.paris.configure(|tables| tables.more = more);
        stage.refused(why);
    }
    stage.paris.configure(|_| ());
    stage.paris.trust(&stage.lyon, "query");
    stage.refused("does not let this host send guests");
    stage.paris.trust(&stage.lyon, "query,send");
    stage.fits();
}

#[test]
fn a_plan_shows_what_the_destination_knows_of_the_guest() {
    let mut stage = Stage::new();
    let plain = GUEST.replace("disks = [{ name = \"vda\", image = \"disk\" }]\n", "");
    stage.paris.start_guest(&plain);
    stage.refused("has a guest called web-7 already");
    stage.paris.stop_guest();
    stage.refused("has a guest called web-7 of its own, which is stopped");
    let own = |host: &Host| host.folder().join("s/descriptions/web-7.toml");
    fs::remove_file(own(&stage.paris)).unwrap();
    stage.fits();

    // The guest moves twice. Then its source forgets that.
    let to = |host: &Host, name: &str| {
        host.agent
            .succeed(&["migrate", "web-7", "--to", name, "--disks", "auto"]);
    };
    to(&stage.lyon, "paris-2");
    to(&stage.paris, "lyon-1");
    stage.fits();
    let known = fs::read_to_string(stage.lyon.folder().join("s/rights/web-7.json")).unwrap();
    assert!(known.contains("here"), "{known}");
    fs::remove_file(stage.lyon.folder().join("s/rights/web-7.json")).unwrap();
    stage.lyon.stop_guest();
    fs::remove_file(own(&stage.lyon)).unwrap();
    stage.lyon.restart();
    stage.lyon.start_guest(GUEST);
    stage.refused("an older copy");
}

#[test]
fn a_plan_shows_what_the_hosts_themselves_lack() {
    let mut stage = Stage::new();
    let hook = |side: &str, step: &str| {
        format!("[hooks.{side}.{step}]\ncommand = [\"/longhaul-absent/hook\"]\nwithin = \"60s\"\n")
    };
    let more = hook("destination", "arriving");
    stage.paris.configure(|tables| tables.more = more);
    stage.refused("/longhaul-absent/hook");
    stage.paris.configure(|_| ());
    let more = hook("source", "prepare");
    stage.lyon.configure(|tables| tables.more = more);
    stage.refused("/longhaul-absent/hook");
    stage.lyon.configure(|_| ());

    let text = stage.paris.folder().join("agent.toml");
    let config = fs::read_to_string(&text).unwrap();
    let qemu = format!("qemu = {:?}", common::qemu());
    let without = config.replace(&qemu, "qemu = \"/longhaul-absent/qemu\"");
    assert_ne!(without, config);
    fs::write(&text, &without).unwrap();
    stage.paris.restart();
    stage.refused("paris-2");
    fs::write(&text, &config).unwrap();
    stage.paris.restart();

    stage.paris.agent.end(nix::sys::signal::Signal::SIGTERM);
    stage.refused("paris-2");
}

#[test]
fn a_plan_shows_what_changed_on_the_source() {
    let (lyon, paris) = (Host::start("lyon-1"), Host::start("paris-2"));
    let shared = tempfile::tempdir().unwrap();
    let (own, data) = (lyon.disk(), shared.path().join("data.raw"));
    let table = format!("[images.data]\npath = {data:?}\nformat = \"raw\"\ndirect = false\n");
    let mut stage = Stage { lyon, paris };
    stage.lyon.trust(&stage.paris, "query,send");
    stage.paris.trust(&stage.lyon, "query,send");
    fs::write(&own, vec![1; DISK_BYTES]).unwrap();
    fs::write(&data, vec![2; DISK_BYTES]).unwrap();
    stage.lyon.configure(|tables| tables.more = table.clone());
    stage.paris.configure(|tables| tables.more = table.clone());
    let more = ", { name = \"vdb\", image = \"data\", shared = true }]\n";
    let guest = GUEST.replace(
        "image = \"disk\" }]\n",
        &format!("image = \"disk\" }}{more}"),
    );
    stage.lyon.start_guest(&guest);
    stage.fits();

    let aside = |file: &Path| file.with_extension("aside");
    for (file, why) in [(&own, "disk vda: "), (&data, "image data: ")] {
        fs::rename(file, aside(file)).unwrap();
        fs::write(file, vec![3; DISK_BYTES]).unwrap();
        stage.refused(&format!(
            "{why}{} is not the file that its QEMU uses",
            file.display()
        ));
        fs::remove_file(file).unwrap();
        stage.refused(why);
        nix::unistd::mkfifo(file, nix::sys::stat::Mode::S_IRWXU).unwrap();
        stage.refused(why);
        fs::remove_file(file).unwrap();
        fs::rename(aside(file), file).unwrap();
        stage.fits();
    }
    let text = stage.lyon.folder().join("agent.toml");
    let config = fs::read_to_string(&text).unwrap();
    for (image, why) in [
        ("disk", "this host does not know the image disk any more"),
        ("data", "this host does not know image data any more"),
    ] {
        let other = config.replace(&format!("[images.{image}]"), "[images.other]");
        fs::write(&text, other).unwrap();
        stage.lyon.restart();
        stage.refused(why);
    }
    // Its QEMU has a raw image, and the configuration says another format.
    let table = format!("path = {own:?}\nformat = ");
    let other = config.replace(&format!("{table}\"raw\""), &format!("{table}\"qcow2\""));
    assert_ne!(other, config);
    fs::write(&text, other).unwrap();
    stage.lyon.restart();
    stage.refused("disk vda: ");
    fs::write(&text, &config).unwrap();
    stage.lyon.restart();

    stage
        .lyon
        .agent
        .succeed(&["guests", "track-writes", "web-7"]);
    // A move ends that.
    stage.fits();
    stage
        .lyon
        .agent
        .succeed(&["guests", "track-writes", "web-7", "--stop"]);
    stage.fits();
}

impl Stage {
    /// Checks that no replication begins, for this reason.
    fn not_replicated(&self, why: &str) {
        let words = ["replicate", "web-7", "--to", "paris-2", "--every", "10m"];
        let output = self.lyon.agent.longhaul(&words);
        let said = self::words(&output.stderr);
        assert!(
            !output.status.success() && said.contains(why),
            "{why}: {said}"
        );
        let all = self.lyon.agent.json(&["replicate"]);
        assert_eq!(
            all["replications"],
            serde_json::json!([]),
            "{why}: it has begun"
        );
    }
}

#[test]
fn a_replication_begins_only_if_the_other_host_takes_it() {
    let mut stage = Stage::new();
    let there = stage.paris.disk();
    stage.paris.trust(&stage.lyon, "query");
    stage.not_replicated("does not let this host send guests");
    stage.paris.trust(&stage.lyon, "query,send");
    let paris = &mut stage.paris;
    paris.configure(|tables| tables.more = "[limits]\nimages = []".to_owned());
    stage.not_replicated("does not let guests of lyon-1 use disk (images)");
    let paris = &mut stage.paris;
    paris.configure(|tables| tables.disk = there.with_file_name("other/disk.raw"));
    stage.not_replicated("has no folder for the image disk");
    let paris = &mut stage.paris;
    paris.configure(|tables| tables.disk = "/dev/longhaul-absent".into());
    stage.not_replicated("a replica needs a file");
    stage.paris.configure(|_| ());
    File::create(&there).unwrap();
    stage.not_replicated("has a file already at the path of the image disk");
    fs::remove_file(&there).unwrap();
    let other = GUEST.replace("image = \"disk\"", "image = \"other\"");
    let text = stage.paris.folder().join("agent.toml");
    let config = fs::read_to_string(&text).unwrap();
    fs::write(&text, config.replace("[images.disk]", "[images.other]")).unwrap();
    stage.paris.restart();
    stage.not_replicated("does not know the image disk");
    fs::write(
        stage.paris.folder().join("images/disk.raw"),
        vec![3; DISK_BYTES],
    )
    .unwrap();
    stage.paris.start_guest(&other);
    stage.not_replicated("a guest web-7 is on paris-2");
    stage.paris.stop_guest();
    let lyon = &stage.lyon;
    for (words, why) in [
        (["replicate", "web-8", "--to", "paris-2"], "web-8"),
        (["replicate", "web-7", "--to", "rome-3"], "rome-3"),
    ] {
        let output = lyon.agent.longhaul(&words);
        let said = self::words(&output.stderr);
        assert!(
            !output.status.success() && said.contains(why),
            "{why}: {said}"
        );
    }
    stage.lyon.stop_guest();
    stage.not_replicated("does not run here");
}
