//! `longhaul image` on a repository in a folder, word for word.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{check, longhaul};
use longhaul_storage::disk::{ImageLock, ImageUse};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

struct Setting {
    folder: TempDir,
}

impl Setting {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let text = format!("state = {state:?}\n");
        fs::write(folder.path().join("agent.toml"), text).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A disk of 8 MiB with the same MiB of content twice, and one word of its own.
    fn disk(&self, name: &str, word: &str) -> PathBuf {
        let path = self.path(name);
        let file = File::create(&path).unwrap();
        file.set_len(8 << 20).unwrap();
        let content: Vec<u8> = (0..1 << 20_u32)
            .map(|place| (place / 4096 % 251) as u8 + 1)
            .collect();
        for offset in [0, 4 << 20] {
            file.write_all_at(&content, offset).unwrap();
        }
        file.write_all_at(word.as_bytes(), 7 << 20).unwrap();
        path
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let config = self.path("agent.toml").display().to_string();
        let arguments = [&["image"], arguments, &["--config", &config]].concat();
        longhaul(&self.path("none"), &arguments)
    }

    fn check(&self, name: &str, arguments: &[&str]) {
        let output = self.run(arguments);
        let shown = [&["image"], arguments].concat();
        check(
            &format!("image_{name}"),
            &shown,
            &output,
            self.folder.path(),
        );
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[arguments, &["--json"]].concat());
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The file of some stripe.
    fn stripe(&self) -> PathBuf {
        let names = |folder: &Path| {
            let entries = fs::read_dir(folder).unwrap();
            entries
                .map(|entry| entry.unwrap().path())
                .collect::<Vec<_>>()
        };
        let folders = names(&self.path("state/repository/stripes"));
        let mut stripes: Vec<_> = folders.iter().flat_map(|folder| names(folder)).collect();
        stripes.sort();
        stripes.remove(0)
    }
}

#[test]
fn images_are_imported_listed_verified_and_removed() {
    let setting = Setting::new();
    let disk = setting.disk("debian.raw", "one").display().to_string();
    let other = setting.disk("web.raw", "other").display().to_string();
    setting.check("none", &["list"]);
    setting.check("import", &["import", &disk, "--name", "debian-12"]);
    setting.check("import_again", &["import", &disk]);
    setting.check("import_other", &["import", &other]);
    setting.check("import_taken", &["import", &other, "--name", "debian-12"]);
    setting.check("list", &["list"]);
    setting.check("verify", &["verify"]);
    setting.check("unknown", &["verify", "fedora"]);
    let list = setting.json(&["list"]);
    assert_eq!(list["images"][0]["names"][0], "debian-12");
    assert_eq!(list["images"][0]["size_bytes"], 8 << 20);
    assert_eq!(list["images"][1]["names"], Value::Array(Vec::new()));

    let stripe = setting.stripe();
    fs::write(&stripe, "damaged").unwrap();
    setting.check("verify_damaged", &["verify", "debian-12"]);
    let verified = setting.json(&["verify", "debian-12"]);
    assert_eq!(verified["images"][0]["good"], false);
    setting.check("import_rewrite", &["import", "--rewrite", &disk]);
    setting.check("verify_mended", &["verify", "debian-12"]);

    setting.check("remove", &["remove", "debian-12"]);
    let left = list["images"][1]["id"].as_str().unwrap().to_owned();
    assert_eq!(setting.json(&["verify"])["images"][0]["good"], true);
    setting.check("remove_last", &["remove", &left[..8]]);
    setting.check("list_none", &["list"]);
}

#[test]
fn a_repository_is_named_by_the_configuration_or_the_command() {
    let setting = Setting::new();
    let disk = setting.disk("disk.img", "one").display().to_string();
    let named = setting.path("elsewhere").display().to_string();
    let config = format!("repository = {named:?}\n");
    fs::write(setting.path("agent.toml"), config).unwrap();
    let id = setting.json(&["import", &disk])["id"].clone();
    assert!(
        setting
            .path("elsewhere/images")
            .join(id.as_str().unwrap())
            .exists()
    );
    let listed = setting.json(&["list", "--repository", &named]);
    assert_eq!(listed["images"][0]["id"], id);
    setting.check("wrong_place", &["list", "--repository", "ftp://images"]);
    let s3 = setting.run(&["list", "--repository", "s3://images"]);
    let said = String::from_utf8(s3.stderr).unwrap();
    assert!(
        said.contains("hint: the service is taken from AWS_ENDPOINT_URL"),
        "{said}"
    );
}

#[test]
fn qcow2_is_the_same_image_as_raw() {
    let setting = Setting::new();
    let raw = setting.disk("disk.raw", "one").display().to_string();
    let qcow2 = setting.path("disk.qcow2").display().to_string();
    let chained = setting.path("chained.qcow2").display().to_string();
    let made = |arguments: &[&str]| {
        let output = Command::new("qemu-img").args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    made(&["convert", "-O", "qcow2", &raw, &qcow2]);
    made(&[
        "create", "-f", "qcow2", "-F", "qcow2", "-b", &qcow2, &chained,
    ]);
    let id = |file: &str| setting.json(&["import", file])["id"].clone();
    assert_eq!(id(&raw), id(&qcow2));
    setting.check("import_chained", &["import", &chained]);
    setting.check("import_no_qcow2", &["import", "--format", "qcow2", &raw]);
}

#[test]
fn what_cannot_be_imported_is_refused_with_what_to_do() {
    let setting = Setting::new();
    let disk = setting.disk("disk.vmdk", "one");
    let path = disk.display().to_string();
    setting.check("import_format", &["import", &path]);
    setting.check("import_missing", &["import", "/nonexistent/disk.raw"]);
    let folder = setting.folder.path().display().to_string();
    setting.check("import_folder", &["import", "--format", "raw", &folder]);
    setting.check("import_name", &["import", &path, "--name", "../x"]);
    let file = File::options().read(true).write(true).open(&disk).unwrap();
    let _guest = ImageLock::alone(&file, ImageUse::Raw).unwrap();
    setting.check("import_in_use", &["import", "--format", "raw", &path]);
    assert!(!setting.path("state").exists());
}
