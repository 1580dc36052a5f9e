use super::*;

fn settings(family: &Family, options: &[&[(&str, &str)]]) -> BTreeMap<String, String> {
    let mut settings = BTreeMap::new();
    for option in options {
        let pairs = option.iter();
        let pairs = pairs.map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        family.add(&mut settings, pairs);
    }
    settings
}

fn line(settings: BTreeMap<String, String>) -> String {
    let hardware = Hardware {
        settings,
        ..Hardware::default()
    };
    assert!(are_sound(&hardware));
    for (name, value) in &hardware.settings {
        let kind = crate::hardware::tables::setting(name).unwrap();
        assert!(kind.takes(value), "{name} {value}");
    }
    let mut line = Line::default();
    arguments(&mut line, &hardware, Path::new("/s,t/run"));
    line.words().join(" ")
}

#[test]
fn options_come_back_in_their_order() {
    let firmware = settings(
        &SMBIOS,
        &[
            &[("type", "1"), ("manufacturer", "A, B"), ("serial", "")],
            &[("type", "11"), ("value", "first"), ("value", "second")],
        ],
    );
    assert_eq!(
        line(firmware),
        "-smbios manufacturer=A,, B,serial=,type=1 -smbios type=11,value=first,value=second"
    );
    let nodes = settings(
        &NUMA,
        &[
            &[
                ("type", "node"),
                ("cpus", "0-1"),
                ("cpus", "4"),
                ("memdev", "m0"),
            ],
            &[("type", "dist"), ("src", "0"), ("dst", "1"), ("val", "20")],
        ],
    );
    assert_eq!(
        line(nodes),
        "-numa cpus=0-1,cpus=4,memdev=m0,type=node -numa dst=1,src=0,type=dist,val=20"
    );
    let ram = settings(
        &RAM,
        &[&[
            ("id", "m0"),
            ("kind", "memfd"),
            ("named-by", "id"),
            ("share", "on"),
            ("size", "1048576"),
        ]],
    );
    assert_eq!(
        line(ram),
        "-object memory-backend-memfd,id=m0,size=1048576,share=on,\
         x-use-canonical-path-for-ramblock-id=off"
    );
}

#[test]
fn contents_are_files_of_the_guests_folder() {
    let mut given = settings(
        &FW_CFG,
        &[
            &[("name", "opt/a"), ("string", "x,y")],
            &[("name", "opt/b"), ("content", "Zm9v")],
        ],
    );
    assert_eq!(
        line(given.clone()),
        "-fw_cfg name=opt/a,string=x,,y -fw_cfg file=/s,,t/run/fw_cfg-001,name=opt/b"
    );
    given.insert(SPLASH.to_owned(), "Zg==".to_owned());
    let hardware = Hardware {
        settings: given,
        ..Hardware::default()
    };
    assert_eq!(
        contents(&hardware, Path::new("/r")),
        [
            (PathBuf::from("/r/fw_cfg-001"), b"foo".to_vec()),
            (PathBuf::from("/r/splash"), b"f".to_vec()),
        ]
    );
}

#[test]
fn what_is_in_no_family_is_refused() {
    for name in [
        "smbios",
        "smbios.0.type",
        "smbios.000.file",
        "smbios.000.type.001",
        "smbios.000.value.1",
        "smbios.0000.type",
        "numa.-01.type",
        "numa.000",
        "ram.000.mem-path",
        "fw_cfg.000.file",
        "other.000.type",
    ] {
        assert!(setting(name).is_none(), "{name}");
    }
    assert!(setting("smbios.000.value.001").is_some());
}

#[test]
fn contents_and_options_have_limits() {
    let sound = |settings| {
        are_sound(&Hardware {
            settings,
            ..Hardware::default()
        })
    };
    let content = |bytes: usize| content::write(&vec![7; bytes]);
    let with = |bytes: usize| {
        let text = content(bytes);
        settings(&FW_CFG, &[&[("name", "opt/a"), ("content", &text)]])
    };
    assert!(sound(with(CONTENTS_BYTES_MAX)));
    assert!(!sound(with(CONTENTS_BYTES_MAX + 1)));
    let mut both = with(CONTENTS_BYTES_MAX);
    both.insert(SPLASH.to_owned(), content(1));
    assert!(!sound(both));
    for incomplete in [
        settings(&FW_CFG, &[&[("name", "opt/a")]]),
        settings(&FW_CFG, &[&[("string", "a"), ("content", "Zg==")]]),
        settings(&RAM, &[&[("id", "a"), ("kind", "ram")]]),
        settings(&RAM, &[&[("id", "a"), ("kind", "ram"), ("size", "1G")]]),
        settings(
            &RAM,
            &[&[
                ("id", "a"),
                ("kind", "ram"),
                ("size", "18446744073709551615"),
            ]],
        ),
        settings(&SMBIOS, &vec![&[("type", "1")][..]; OPTIONS_MAX + 1]),
    ] {
        assert!(!sound(incomplete.clone()), "{incomplete:?}");
    }
}

#[test]
fn a_folder_has_the_path_of_its_host() {
    let mut hardware = Hardware::default();
    let pairs = [
        ("id", "f0"),
        ("folder", "public"),
        ("security_model", "none"),
    ];
    let pairs = pairs.map(|(key, value)| (key.to_owned(), value.to_owned()));
    FSDEV.add(&mut hardware.settings, pairs);
    assert_eq!(folders(&hardware).collect::<Vec<_>>(), ["public"]);
    assert!(are_sound(&hardware));
    let mut line = Line::default();
    folder_arguments(&mut line, &hardware, |name| {
        Ok::<_, ()>(format!("/srv/{name},1"))
    })
    .unwrap();
    assert_eq!(
        line.words(),
        [
            "-fsdev",
            "local,path=/srv/public,,1,id=f0,security_model=none"
        ]
    );
    hardware.settings.remove("fsdev.000.folder");
    assert!(!are_sound(&hardware));
}
