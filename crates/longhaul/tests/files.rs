//! Tests the protocol between two agents about files that do not move with a guest: between a real
//! agent and one that claims anything, or is of an older version.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
#[allow(unreachable_pub, dead_code)]
mod hostile {
    pub mod peer;
}

use common::{Agent, free_address};
use hostile::peer::{Bad, End, Victim, empty_machine, guest, offer};
use longhaul_protocol::files::{FileClaim, FileContent, FileKind, LockPattern};
use longhaul_protocol::guest::{Disk, GuestDescription, Kernel};
use longhaul_protocol::hardware::{Flash, Hardware, Topology};
use longhaul_protocol::message::{
    Answer, Check, DisksOffer, FilesOffer, FilesQuery, Offer, Query, RefusalCode, ToDestination,
    ToSource, Verdict,
};
use longhaul_protocol::wire;
use longhaul_storage::same_file::HeldLocks;
use longhaul_transport::{
    Endpoint, EndpointConfig, Hello, Identity, Scope, TRUST_FILE, TrustStore, TrustedHost,
};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A victim with two images beside the absent one: one for data, and one that is never written.
struct Stage {
    victim: Victim,
    images: tempfile::TempDir,
}

impl std::ops::Deref for Stage {
    type Target = Victim;

    fn deref(&self) -> &Victim {
        &self.victim
    }
}

impl Stage {
    fn new(more: &str) -> Self {
        let images = tempfile::tempdir().unwrap();
        fs::write(images.path().join("data"), vec![1; 1 << 20]).unwrap();
        fs::write(images.path().join("seed"), "of the victim").unwrap();
        let victim = Victim::start(&(tables(images.path()) + more));
        Self { victim, images }
    }

    fn image(&self, name: &str) -> PathBuf {
        self.images.path().join(name)
    }
}

/// Returns configuration tables for images in this folder.
fn tables(folder: &Path) -> String {
    let image = |name: &str| {
        let path = folder.join(name);
        format!("[images.{name}]\npath = {path:?}\nformat = \"raw\"\ndirect = false\n")
    };
    image("data") + &image("seed")
}

fn with_disk(image: &str, read_only: bool) -> GuestDescription {
    let mut guest = guest("web-7");
    guest.disks.push(Disk {
        name: "vda".to_owned(),
        image: image.to_owned(),
        shared: !read_only,
        read_only,
    });
    guest
}

fn claim(image: &str, path: &str) -> FileClaim {
    FileClaim {
        kind: FileKind::Image,
        name: image.to_owned(),
        path: path.to_owned(),
        locks: None,
        content: None,
    }
}

fn asked(guest: &GuestDescription, files: Vec<FileClaim>) -> ToDestination {
    let query = Query {
        guest: guest.clone(),
        machine: empty_machine(),
    };
    ToDestination::QueryFiles(Box::new(FilesQuery { query, files }))
}

async fn answer(bad: &Bad, question: &ToDestination) -> Vec<Check> {
    match bad.first(question).await {
        End::Said(ToSource::Answer(answer)) => answer.checks,
        other => panic!("{other:?}"),
    }
}

/// Returns the checks of an image.
fn of<'a>(checks: &'a [Check], image: &str) -> &'a Check {
    let about = format!("image {image}");
    let mut about = checks.iter().filter(|check| check.text.contains(&about));
    let check = about.next().unwrap_or_else(|| panic!("{checks:?}"));
    assert!(about.next().is_none(), "{checks:?}");
    check
}

#[tokio::test(flavor = "multi_thread")]
async fn who_says_nothing_of_a_file_is_not_believed() {
    let victim = Stage::new("");
    let old = Bad::with("old", &victim, (1, 1), "query,send").await;
    let new = Bad::new("new", &victim).await;
    for (peer, name) in [(&old, "old"), (&new, "new")] {
        let query = Query {
            guest: with_disk("data", false),
            machine: empty_machine(),
        };
        let checks = answer(peer, &ToDestination::Query(Box::new(query))).await;
        let check = of(&checks, "data");
        assert_eq!(check.verdict, Verdict::Refused);
        assert!(check.text.contains("was not told"), "{check:?}");
        let hint = check.hint.as_ref().unwrap();
        assert!(
            hint.contains(&format!("update the agent on {name}")),
            "{hint}"
        );
        let mut offer = offer("web-7", victim.machine(&guest("web-7")).await);
        offer.guest = with_disk("data", false);
        let refusal = peer.refused(offer).await;
        assert_eq!(refusal.code, RefusalCode::Unsuitable);
        assert!(refusal.text.contains("was not told"), "{refusal:?}");
        // Nor for claims about another file.
        let other = asked(&with_disk("data", false), vec![claim("seed", "/a")]);
        let checks = answer(peer, &other).await;
        assert!(
            of(&checks, "data").text.contains("was not told"),
            "{checks:?}"
        );
        // A guest without any is handled as before.
        peer.is_answered().await;
    }
    assert_eq!(victim.uses().journals, 0);
    assert_eq!(victim.uses().guests, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn variables_and_initrds_are_of_both_hosts_or_of_none() {
    let kernels = "[firmware]\nuefi = \"/dev/null\"\n[kernels.rescue]\nkernel = \"/dev/null\"\n";
    let local =
        tables(Path::new("/absent")).replace("[images.seed]", "local = true\n[images.seed]");
    let victim = Victim::start(&(local + kernels));
    let bad = Bad::new("bad", &victim).await;
    let mut guest = guest("web-7");
    guest.kernel = Some(Kernel {
        name: "rescue".to_owned(),
        command_line: String::new(),
    });
    let initrd = FileClaim {
        kind: FileKind::Initrd,
        ..claim("rescue", "/initrd")
    };
    let kernel = FileClaim {
        kind: FileKind::Kernel,
        ..claim("rescue", "/kernel")
    };
    let checks = answer(&bad, &asked(&guest, vec![kernel, initrd])).await;
    let refused = |checks: &[Check], why: &str| {
        let refuses = |check: &Check| check.verdict == Verdict::Refused && check.text.contains(why);
        assert!(checks.iter().any(refuses), "{why}: {checks:#?}");
    };
    refused(&checks, "kernel rescue has an initrd on bad, and none on");

    guest.kernel = None;
    guest.hardware = Some(Hardware {
        topology: Topology {
            sockets: guest.vcpus,
            dies: 1,
            cores: 1,
            threads: 1,
        },
        flash: Some(Flash {
            code: "uefi".to_owned(),
            variables: Some("data".to_owned()),
        }),
        ..Hardware::default()
    });
    let checks = answer(&bad, &asked(&guest, vec![claim("data", "/variables")])).await;
    refused(
        &checks,
        "image data, which holds the firmware's variables, moves along from",
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_tells_of_its_files_what_a_move_needs_and_no_more() {
    let victim = Stage::new("[hosts.bound.limits]\nimages = [\"data\"]\n");
    let bad = Bad::new("bad", &victim).await;
    let bound = Bad::new("bound", &victim).await;
    let data = with_disk("data", false);
    let seed = with_disk("seed", true);
    // A claimed path is never opened: it is reported as claimed, and changes nothing.
    let mut said = Vec::new();
    let own = victim.image("data").display().to_string();
    for path in ["/nonexistent", "/etc/passwd", &own, "\u{1b}[31m\"\n"] {
        let checks = answer(&bad, &asked(&data, vec![claim("data", path)])).await;
        let check = of(&checks, "data").clone();
        assert_eq!(check.verdict, Verdict::Refused);
        let hint = check.hint.unwrap();
        assert!(!hint.contains(['\u{1b}', '\n']), "{hint}");
        said.push((check.text, hint.replace(path, "PATH")));
    }
    assert!(said.windows(2).all(|two| two[0] == two[1]), "{said:?}");
    let images = victim.images.path().display().to_string();
    assert!(!format!("{said:?}").contains(&images), "{said:?}");
    // A pattern that is not locked.
    let mut guessed = claim("data", "/srv/data");
    guessed.locks = Some(LockPattern {
        first: 1 << 62,
        mask: [0x0f; 16],
    });
    let checks = answer(&bad, &asked(&data, vec![guessed.clone()])).await;
    assert!(
        of(&checks, "data").text.contains("nothing proves"),
        "{checks:?}"
    );
    // Content proves nothing for a file that is written to.
    let content = |bytes: &[u8]| {
        Some(FileContent {
            bytes: bytes.len() as u64,
            digest: *blake3::hash(bytes).as_bytes(),
        })
    };
    guessed.content = content(&vec![1; 1 << 20]);
    let checks = answer(&bad, &asked(&data, vec![guessed])).await;
    assert_eq!(of(&checks, "data").verdict, Verdict::Refused);
    // For a read-only file equal content is sufficient, and is requested.
    let mut claimed = claim("seed", "/srv/seed");
    let wanted = bad.first(&asked(&seed, vec![claimed.clone()])).await;
    let expected = ToSource::WantContent { files: vec![0] };
    assert!(matches!(wanted, End::Said(said) if said == expected));
    for (bytes, verdict, text) in [
        ("of the victim", Verdict::Fine, "equal content (BLAKE3 "),
        (
            "of the bad one",
            Verdict::Refused,
            "14 bytes on bad, 13 bytes on victim",
        ),
        ("of the Victim", Verdict::Refused, "... on bad, "),
    ] {
        claimed.content = content(bytes.as_bytes());
        let checks = answer(&bad, &asked(&seed, vec![claimed.clone()])).await;
        let check = of(&checks, "seed");
        assert_eq!(check.verdict, verdict, "{check:?}");
        assert!(check.text.contains(text), "{check:?}");
    }
    // Names without a meaning here, and names that a peer may not use.
    let other = with_disk("other", true);
    let checks = answer(&bad, &asked(&other, vec![claim("other", "/etc/passwd")])).await;
    let unknown = "it has no image called other";
    assert!(
        checks.iter().any(|check| check.text.contains(unknown)),
        "{checks:?}"
    );
    assert!(
        !checks
            .iter()
            .any(|check| check.text.starts_with("image other"))
    );
    let checks = answer(&bound, &asked(&seed, vec![claimed])).await;
    let allowed = checks.iter().find(|check| check.text.contains("use seed"));
    let hint = allowed.and_then(|check| check.hint.as_ref());
    assert!(
        hint.is_some_and(|hint| hint.contains("`images`")),
        "{checks:?}"
    );
    assert!(
        !checks.iter().any(|check| check.text.contains("BLAKE3")),
        "{checks:?}"
    );
    // A file that cannot be opened is reported without its path.
    let secret = with_disk("secret", false);
    let checks = answer(&bad, &asked(&secret, vec![claim("secret", "/a")])).await;
    let check = of(&checks, "secret");
    assert!(check.text.contains("No such file"), "{check:?}");
    assert!(!format!("{check:?}").contains("/nonexistent"), "{check:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_ask_or_send_is_answered() {
    let victim = Stage::new("");
    let question = asked(&with_disk("data", false), vec![claim("data", "/a")]);
    for may in ["query", "send"] {
        let versions = (wire::VERSION_OLDEST, wire::VERSION);
        let peer = Bad::with(may, &victim, versions, may).await;
        let checks = answer(&peer, &question).await;
        assert_eq!(of(&checks, "data").verdict, Verdict::Refused);
    }
}

fn offered(offer: Offer, claim: FileClaim) -> ToDestination {
    let (disks, files) = (Vec::new(), vec![claim]);
    let offer = DisksOffer { offer, disks };
    ToDestination::OfferFiles(Box::new(FilesOffer { offer, files }))
}

/// A host that holds the locks has the file, and the destination's QEMU opens the same.
#[tokio::test(flavor = "multi_thread")]
async fn an_offer_is_taken_while_its_locks_are_held_and_not_later() {
    let victim = Stage::new("");
    let source = Bad::new("source", &victim).await;
    let description = with_disk("data", false);
    let data = victim.image("data");
    let tables = tables(victim.images.path());
    let machine = victim.machine_with(&description, &tables).await;
    let mut offer = offer("web-7", machine);
    offer.guest = description.clone();
    // By another name of it, as another host might have it.
    let link = data.with_extension("link");
    fs::hard_link(&data, &link).unwrap();
    let held = HeldLocks::take(File::open(&link).unwrap()).unwrap();
    let mut claim = claim("data", "/srv/elsewhere");
    claim.locks = Some(held.pattern());
    let checks = answer(&source, &asked(&description, vec![claim.clone()])).await;
    let check = of(&checks, "data");
    assert_eq!(check.verdict, Verdict::Fine);
    assert_eq!(
        check.text,
        "image data: one file on both hosts (proved by locks)"
    );
    let mut call = source.call(&offered(offer.clone(), claim.clone())).await;
    assert!(matches!(call.next().await, ToSource::Launching { .. }));
    assert!(matches!(call.next().await, ToSource::Accepted { .. }));
    call.cancel().await;
    call.last().await;
    victim.is_empty().await;
    drop(held);
    offer.attempt = longhaul_protocol::Attempt(2);
    let again = offered(offer, claim);
    // The first attempt may still be about to end.
    let refusal = loop {
        match source.first(&again).await {
            End::Said(ToSource::Refused(refusal)) if refusal.code == RefusalCode::Busy => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            End::Said(ToSource::Refused(refusal)) => break refusal,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refusal.code, RefusalCode::Unsuitable);
    let why = "the locks that source holds on its file are not on that of victim";
    assert!(refusal.text.contains(why), "{refusal:?}");
    victim.is_empty().await;
}

/// Returns a host of the first version, which accepts every guest.
async fn old_host(
    folder: &Path,
    lyon: &Agent,
) -> (Endpoint, String, Arc<Mutex<Vec<&'static str>>>) {
    let identity = Identity::load_or_create(folder).unwrap();
    let fingerprint = identity.host_id().to_string();
    let trust = TrustStore::open(&folder.join(TRUST_FILE)).unwrap();
    let id = lyon.json(&["host"])["fingerprint"].clone();
    let source = TrustedHost {
        name: "lyon".to_owned(),
        id: id.as_str().unwrap().parse().unwrap(),
        addresses: vec!["127.0.0.1:9".to_owned()],
        scope: Scope {
            may_query: true,
            may_send_guests: true,
        },
    };
    trust.add(source).unwrap();
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        software: "longhaul 0.0.9".to_owned(),
        incarnation: None,
    };
    let config = EndpointConfig::new("127.0.0.1:0".parse().unwrap(), hello);
    let endpoint = Endpoint::bind(config, identity, trust).unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let (accepting, note) = (endpoint.clone(), heard.clone());
    tokio::spawn(async move {
        while let Some(control) = accepting.accept().await {
            let note = note.clone();
            tokio::spawn(async move {
                while let Ok(mut channel) = control.accept().await {
                    let first = channel.recv().await.unwrap().unwrap();
                    let said = match wire::decode::<ToDestination>(&first).unwrap() {
                        ToDestination::Query(_) => "query",
                        _ => "something else",
                    };
                    note.lock().unwrap().push(said);
                    let answer = Answer {
                        host: "old".to_owned(),
                        checks: Vec::new(),
                    };
                    let answer = wire::encode(&ToSource::Answer(answer)).unwrap();
                    channel.send(&answer).await.unwrap();
                }
            });
        }
    });
    (endpoint, fingerprint, heard)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_cannot_prove_anything_is_offered_no_guest_with_files() {
    let lyon = Agent::start_configured(|folder| {
        let image = folder.join("image");
        fs::write(&image, vec![1; 1 << 20]).unwrap();
        common::host("lyon", &free_address(), folder)
            + &format!("[images.data]\npath = {image:?}\nformat = \"raw\"\ndirect = false\n")
    });
    let folder = tempfile::tempdir().unwrap();
    let (endpoint, fingerprint, heard) = old_host(folder.path(), &lyon).await;
    let address = endpoint.local_address().unwrap().to_string();
    lyon.succeed(&[
        "host",
        "trust",
        "old",
        &fingerprint,
        &address,
        "--may",
        "query,send",
    ]);
    let description = lyon.folder.path().join("web-7.toml");
    fs::write(
        &description,
        toml::to_string(&with_disk("data", false)).unwrap(),
    )
    .unwrap();
    lyon.succeed(&["guests", "start", &description.display().to_string()]);
    let why =
        "runs \"longhaul 0.0.9\", which cannot prove that both hosts have the same image data";
    for command in ["plan", "migrate"] {
        let output = lyon.longhaul(&[command, "web-7", "--to", "old"]);
        assert_eq!(output.status.code(), Some(3), "{command}: {output:?}");
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8(said).unwrap();
        let words: Vec<&str> = said.split_whitespace().collect();
        assert!(words.join(" ").contains(why), "{said}");
        assert!(said.contains("update the agent on old"), "{said}");
    }
    let why = "runs \"longhaul 0.0.9\", to which no memory can follow its guest";
    for command in ["plan", "migrate"] {
        let words = [command, "web-7", "--to", "old", "--strategy", "postcopy"];
        let output = lyon.longhaul(&words);
        assert_eq!(output.status.code(), Some(3), "{command}: {output:?}");
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8(said).unwrap();
        let words: Vec<&str> = said.split_whitespace().collect();
        assert!(words.join(" ").contains(why), "{said}");
    }
    let heard = heard.lock().unwrap().clone();
    assert!(heard.iter().all(|said| *said == "query"), "{heard:?}");
    let journals = lyon.folder.path().join("s/journal");
    // Nothing but the incarnation of them all.
    assert_eq!(fs::read_dir(journals).unwrap().count(), 1);
    lyon.succeed(&["guests", "stop", "--force", "web-7"]);
}
